"""``memfit frontier``: what memory costs in time, for one profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.options import AsJson, HostBudgetText, PageFile, ProfileFile, parse_host_budget
from memfit.cli.output import check_outputs, console, print_json, print_written


def frontier(
    file: ProfileFile,
    points: Annotated[int, typer.Option(help="How many plans to show at most.", min=1)] = 16,
    host_budget: HostBudgetText = None,
    html: PageFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the trade-off to this .png, .svg or .pdf; needs memfit\\[plot].", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what memory costs in time: the plans from the fastest to the smallest.

    [dim]memfit frontier profile.json --html page.html[/]
    """
    from memfit.cli.pages import NUM_POINTS, report_data
    from memfit.cli.stages import frontier_of
    from memfit.graph.model_profile import ModelProfile
    from memfit.report.page import write_page
    from memfit.report.plot import check_plot, write_plot

    on_host = parse_host_budget(host_budget)
    measured = ModelProfile.load(file)
    check_outputs(html, plot, inputs=[file])
    if plot is not None:
        check_plot(plot)
    found = frontier_of(measured, points, on_host)
    if html is not None or plot is not None:
        data = report_data(measured, frontier_of(measured, max(points, NUM_POINTS), on_host), title=file.name)
    if plot is not None:
        write_plot(plot, data)
    if html is not None:
        write_page(html, data)
    if as_json:
        print_json(
            {
                "plain_peak_bytes": measured.peak_bytes,
                "points": [point.facts() for point in found],
            }
        )
        return
    from memfit.report.step_tables import frontier_table

    console().print(frontier_table(measured, found, title=f"{file.name}: memory against time"))
    print_written(plot, html)
