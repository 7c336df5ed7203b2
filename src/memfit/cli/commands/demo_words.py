"""What the demo found, in words. Numbers come from the measurements; nothing is decided here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.report.step_tables import comparison_table
from memfit.units import format_bytes, format_overhead

if TYPE_CHECKING:
    from memfit.demonstration.demonstrating import Demonstration
    from memfit.graph.verification import MethodResult


def demo_table(found: Demonstration) -> Table:
    """Return one row per method."""
    title = f"A GPT of {found.num_parameters:,} parameters, one step with AdamW on one CPU thread"
    return comparison_table(found.methods, title=title)


def demo_words(found: Demonstration) -> Padding:
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
    return f"Trained for {num_steps} steps on generated text, the loss goes from {start:.2f} to {end:.2f}, {compared}."
