"""``memfit fit``: profile, plan, apply and verify for a TARGET and a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.options import (
    Arguments,
    AsJson,
    HostBudgetText,
    PageFile,
    TargetText,
    parse_budget,
    parse_host_budget,
)
from memfit.cli.output import check_outputs, console, print_json, prints_aside


def fit(
    target: TargetText,
    budget: Annotated[
        str,
        typer.Option(
            help='The largest allowed peak: "2GiB", "900MB", a share of the device such as "90%" or "0.9", or "auto".',
            show_default=False,
        ),
    ],
    host_budget: HostBudgetText = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Save the plan to this file.", show_default=False)
    ] = None,
    html: PageFile = None,
    arg: Arguments = None,
    as_json: AsJson = False,
) -> None:
    """Fit a training step into a budget: profile, plan, apply, verify.

    [dim]memfit fit memfit.models:gpt --arg layers=12 --budget 300MiB --html page.html[/]
    """
    from memfit.cli.stages import fitted, frontier_of, target_to_run
    from memfit.cli.target import source_files
    from memfit.graph.verification_file import verification_document

    wanted, wanted_on_host = parse_budget(budget), parse_host_budget(host_budget)
    check_outputs(output, html, inputs=source_files(target))
    with prints_aside(as_json):
        result = fitted(target_to_run(target, arg), wanted, wanted_on_host)
    if output is not None:
        result.plan.save(output)
    if html is not None:
        from memfit.cli.pages import NUM_POINTS, report_data, write_report_page

        points = frontier_of(result.profile, NUM_POINTS, wanted_on_host)
        verifications = (result.verification,)
        data = report_data(result.profile, points, title=target, plan=result.plan, verifications=verifications)
        write_report_page(html, data)
    if as_json:
        print_json(
            {
                "budget_bytes": result.plan.budget_bytes,
                "predicted_peak_bytes": result.plan.predicted_peak_bytes,
                "predicted_overhead": result.plan.predicted_overhead,
                "optimality_gap": result.plan.optimality_gap,
                "recompute_flops": result.plan.recompute_flops,
                "host_bytes": result.plan.host_bytes,
                "verification": verification_document(result.verification),
            }
        )
        return
    from memfit.report.step_tables import plan_summary, verification_summary

    screen = console()
    screen.print(f"{target}: the plan", style="bold", markup=False, soft_wrap=True)
    screen.print(plan_summary(result.profile, result.plan))
    screen.print(f"{target}: measured", style="bold", markup=False, soft_wrap=True)
    screen.print(verification_summary(result.verification))
    if output is None and html is None:
        budgets = f'budget="{budget}"' + (f', host_budget="{host_budget}"' if host_budget is not None else "")
        screen.print(f"In Python: memfit.fit(model, batch, {budgets})", markup=False, soft_wrap=True)
    for written in (output, html):
        if written is not None:
            screen.print(f"Wrote {written}.", markup=False, soft_wrap=True)
