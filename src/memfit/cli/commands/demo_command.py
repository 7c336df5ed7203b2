"""``memfit demo``: profile, plan, verify and train a built-in model, on the CPU, with the page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from memfit.cli.commands.layers_demo import show_layers_demo
from memfit.cli.options import AsJson
from memfit.cli.output import check_outputs, console, make_folder, print_json
from memfit.progress import progress_of_command
from memfit.units import format_bytes, format_overhead

if TYPE_CHECKING:
    from memfit.demonstration.demonstrating import Demonstration, Sizes
    from memfit.graph.verification import MethodResult

_DEFAULT_FOLDER = Path("memfit-demo")
_FILES = ("page.html", "profile.json", "plan.json")


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
    from memfit.demonstration.demonstrating import Sizes

    show_demo(Sizes(), _DEFAULT_FOLDER if out is None else out, as_json=as_json)


def show_demo(sizes: Sizes, folder: Path, *, as_json: bool) -> None:
    """Run the demo at the given ``sizes``, write its files into ``folder``, and print what it found."""
    from memfit.demonstration.demonstrating import demonstrate

    make_folder(folder)
    check_outputs(*(folder / name for name in _FILES))
    with progress_of_command() as progress:
        found = demonstrate(sizes, progress)
    written = _write(found, folder)
    if as_json:
        print_json(demo_document(found, written))
        return
    from memfit.report.step_tables import comparison_table

    screen = console()
    title = f"A GPT of {found.num_parameters:,} parameters, one step with AdamW on one CPU thread"
    screen.print(comparison_table(found.methods, title=title))
    screen.print(_in_words(found))
    screen.print(f"Open {written[0]} in a browser for the whole trade-off.", markup=False, soft_wrap=True)


def _write(found: Demonstration, folder: Path) -> list[Path]:
    """Write the page, the profile and the plan of the smallest budget; return their paths, the page first."""
    from memfit.cli.pages import marks_of_methods, report_data
    from memfit.report.page import write_page

    page, profile_file, plan_file = (folder / name for name in _FILES)
    smallest = list(found.plans.values())[-1]
    data = report_data(
        found.profile,
        found.points,
        title="memfit demo: a small GPT",
        plan=smallest,
        other_marks=marks_of_methods(found.methods),
    )
    write_page(page, data)
    found.profile.save(profile_file)
    smallest.save(plan_file)
    return [page, profile_file, plan_file]


def demo_document(found: Demonstration, written: list[Path]) -> dict[str, object]:
    """Return what the demo found, as ``--json`` prints it."""
    return {
        "num_parameters": found.num_parameters,
        "methods": [asdict(method) for method in found.methods],
        "plain_losses": list(found.plain_losses),
        "planned_losses": list(found.planned_losses),
        "written": [str(path) for path in written],
    }


def _in_words(found: Demonstration) -> Padding:
    """Return a paragraph that compares the methods."""
    plain, *budgets, checkpointed = found.methods
    first, last = budgets[0], budgets[-1]
    sentences = [
        f"The plain step needs {_peak(plain)}.",
        f"With a plan it needs {_peak(first)}, {_share(first, plain)} of that, for {format_overhead(first.overhead)} "
        f"time, or {_peak(last)}, {_share(last, plain)}, for {format_overhead(last.overhead)}.",
        f"With torch's checkpointing of every block it needs {_peak(checkpointed)}, for "
        f"{format_overhead(checkpointed.overhead)}.",
        _gradients_in_words(found),
        _training_in_words(found),
    ]
    return Padding(Text(" ".join(sentences)), (0, 1, 1, 1))


def _peak(result: MethodResult) -> str:
    return format_bytes(result.peak_bytes or 0)


def _share(result: MethodResult, plain: MethodResult) -> str:
    return f"{(result.peak_bytes or 0) / (plain.peak_bytes or 1):.0%}"


def _gradients_in_words(found: Demonstration) -> str:
    differing = [result.label for result in found.methods if not result.gradients_equal]
    if differing:
        return f"Gradients differ from the plain step's: {', '.join(differing)}."
    return "All gradients are those of the plain step, bit for bit."


def _training_in_words(found: Demonstration) -> str:
    num_steps = len(found.plain_losses)
    start, end = found.plain_losses[0], found.plain_losses[-1]
    if found.plain_losses == found.planned_losses:
        compared = "and the smallest plan gives the same loss at every step, to the last bit"
    else:
        compared = f"and {found.planned_losses[-1]:.3f} with the smallest plan"
    return f"Trained for {num_steps} steps on generated text, the loss falls from {start:.2f} to {end:.2f}, {compared}."
