"""``memfit verify``: run a plan on a TARGET and compare it with the plain step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.exit_codes import CHECK_DID_NOT_HOLD
from memfit.cli.options import Arguments, AsJson, TargetText, VerificationOutput
from memfit.cli.output import check_outputs, console, print_json, print_written, prints_aside


def verify(
    target: TargetText,
    file: Annotated[Path, typer.Argument(help="A plan, as `memfit plan` writes it.", show_default=False)],
    output: VerificationOutput = None,
    arg: Arguments = None,
    as_json: AsJson = False,
) -> None:
    """Run a plan and compare gradients, peak and time with the plain step. Exits 1 if a check fails.

    [dim]memfit verify memfit.models:gpt plan.json[/]
    """
    from memfit.cli.stages import engine_in_words, target_to_run, verified
    from memfit.cli.target import source_files
    from memfit.graph.plan import Plan
    from memfit.graph.verification_file import verification_document

    plan = Plan.load(file)
    check_outputs(output, inputs=[file, *source_files(target)])
    with prints_aside(as_json):
        verification = verified(target_to_run(target, arg), plan)
    if output is not None:
        verification.save(output)
    if as_json:
        print_json(verification_document(verification))
    else:
        from memfit.report.step_tables import verification_summary

        console().print(verification_summary(verification, plan=plan, engine=engine_in_words()))
        print_written(output)
    if not verification.holds:
        raise typer.Exit(CHECK_DID_NOT_HOLD)
