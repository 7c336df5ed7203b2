"""``memfit profile``: measure one training step of a TARGET."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

import typer

from memfit.cli.options import Arguments, AsJson, ChunkLoss, Compile, ProfileOutput, TargetText
from memfit.cli.output import check_outputs, console, print_json, print_written, prints_aside


def profile(
    target: TargetText,
    output: ProfileOutput = None,
    fake: Annotated[
        bool,
        typer.Option("--fake", help="Run on fake tensors, where the plain step does not fit: times are estimates."),
    ] = False,
    compile: Compile = False,
    chunk_loss: ChunkLoss = False,
    arg: Arguments = None,
    as_json: AsJson = False,
) -> None:
    """Measure one training step: its memory, its time, every op and every value.

    [dim]memfit profile memfit.models:gpt --arg layers=12 -o profile.json[/]
    """
    from memfit.cli.stages import profiled, target_to_run
    from memfit.cli.target import source_files

    check_outputs(output, inputs=source_files(target))
    with prints_aside(as_json):
        mode: Literal["real", "fake"] = "fake" if fake else "real"
        measured = profiled(target_to_run(target, arg), mode=mode, compile=compile, chunk_loss=chunk_loss)
    if output is not None:
        measured.save(output)
    if as_json:
        print_json(
            {
                "peak_bytes": measured.peak_bytes,
                "step_seconds": measured.step_seconds,
                "device": measured.device,
                "device_bytes": measured.device_bytes,
                "free_bytes": measured.free_bytes,
                "fingerprint": measured.fingerprint,
                "measured_with": measured.measured_with,
                "link": None if measured.link is None else asdict(measured.link),
                "compile_seconds": None if measured.compiled is None else measured.compiled.compile_seconds,
                "num_ops": len(measured.ops),
                "num_values": len(measured.values),
                "blocks": [
                    {
                        "path": block.path,
                        "layer_type": str(block.layer.layer_type),
                        "activation_size_bytes": block.layer.activation_size_bytes,
                        "recompute_flops": block.layer.recompute_flops,
                    }
                    for block in measured.blocks
                ],
            }
        )
        return
    from memfit.report.step_tables import profile_summary, profile_table

    screen = console()
    if measured.blocks:
        screen.print(profile_table(measured, title=target))
    screen.print(profile_summary(measured))
    print_written(output)
