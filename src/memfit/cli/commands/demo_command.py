"""``memfit demo``: profile, plan, verify and train a built-in model, on the CPU, with the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.commands.layers_demo import show_layers_demo
from memfit.cli.options import AsJson
from memfit.cli.output import console, make_folder, print_json
from memfit.progress import progress_on_terminal

if TYPE_CHECKING:
    from memfit.demonstration.demonstrating import Demonstration
    from memfit.report.page_data import Mark

_DEFAULT_FOLDER = Path("memfit-demo")


def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="The folder for the page, the profile and the plan.  [default: memfit-demo]"),
    ] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Plan a list of layers with every strategy instead; needs no torch.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a small GPT plain, at three budgets and fully checkpointed, and compare memory and time.

    [dim]memfit demo --out memfit-demo[/]
    """
    if layers:
        show_layers_demo(out, as_json=as_json)
        return
    from memfit.demonstration.demonstrating import Sizes, demonstrate

    folder = _DEFAULT_FOLDER if out is None else out
    make_folder(folder)
    with progress_on_terminal() as progress:
        found = demonstrate(Sizes(), progress)
    written = _write(found, folder)
    if as_json:
        print_json(_document(found, written))
        return
    from memfit.cli.commands.demo_words import demo_table, demo_words

    screen = console()
    screen.print(demo_table(found))
    screen.print(demo_words(found))
    screen.print(f"Open {written[0]} in a browser for the whole trade-off.", markup=False, soft_wrap=True)


def _write(found: Demonstration, folder: Path) -> list[Path]:
    """Write the page, the profile and the plan of the smallest budget; return their paths, the page first."""
    from memfit.cli.pages import report_data, write_report_page

    page, profile_file, plan_file = folder / "page.html", folder / "profile.json", folder / "plan.json"
    smallest = list(found.plans.values())[-1]
    data = report_data(
        found.profile, found.points, title="memfit demo: a small GPT", plan=smallest, other_marks=_marks(found)
    )
    write_report_page(page, data)
    found.profile.save(profile_file)
    smallest.save(plan_file)
    return [page, profile_file, plan_file]


def _marks(found: Demonstration) -> list[Mark]:
    from memfit.report.page_data import Mark

    return [
        Mark(
            way.label,
            way.peak_bytes,
            way.overhead,
            is_measured=True,
            note="gradients equal" if way.gradients_equal else "gradients differ",
        )
        for way in found.ways
    ]


def _document(found: Demonstration, written: list[Path]) -> dict[str, object]:
    return {
        "num_parameters": found.num_parameters,
        "ways": [
            {
                "label": way.label,
                "peak_bytes": way.peak_bytes,
                "step_seconds": way.step_seconds,
                "overhead": way.overhead,
                "overhead_quartiles": list(way.overhead_quartiles),
                "gradients_equal": way.gradients_equal,
            }
            for way in found.ways
        ],
        "plain_losses": list(found.plain_losses),
        "planned_losses": list(found.planned_losses),
        "written": [str(path) for path in written],
    }
