"""What the demo found, as a table and in words. Numbers come from the measurements; nothing is decided here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.units import format_bytes, format_overhead, format_seconds

if TYPE_CHECKING:
    from memfit.demonstration.demonstrating import Demonstration


def demo_table(found: Demonstration) -> Table:
    """Return one row per method."""
    title = f"A GPT of {found.num_parameters:,} parameters, one step with AdamW on one CPU thread"
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=True)
    table.add_column("method", no_wrap=True)
    for heading in ("peak", "of plain", "step", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("gradients", no_wrap=True)
    plain_peak_bytes = found.ways[0].peak_bytes
    for way in found.ways:
        verdict = Text("equal", style="green") if way.gradients_equal else Text("differ", style="bold red")
        table.add_row(
            way.label,
            format_bytes(way.peak_bytes),
            f"{way.peak_bytes / plain_peak_bytes:.0%}",
            format_seconds(way.step_seconds),
            format_overhead(way.overhead),
            verdict,
        )
    return table


def demo_words(found: Demonstration) -> Padding:
    """Return a paragraph that compares the methods."""
    plain, *budgets, checkpointed = found.ways
    first, last = budgets[0], budgets[-1]
    low, high = last.overhead_quartiles
    sentences = [
        f"Saved whole, the step needs {format_bytes(plain.peak_bytes)}.",
        f"At {format_bytes(first.peak_bytes)} it fits into {first.peak_bytes / plain.peak_bytes:.0%} of that, at "
        f"{format_overhead(first.overhead)} time;",
        f"at {format_bytes(last.peak_bytes)}, into {last.peak_bytes / plain.peak_bytes:.0%}, at "
        f"{format_overhead(last.overhead)} (25th to 75th percentile: {format_overhead(low)} to "
        f"{format_overhead(high)}).",
        f"Checkpointing every block with torch needs {format_bytes(checkpointed.peak_bytes)}, at "
        f"{format_overhead(checkpointed.overhead)}.",
        _gradients_in_words(found),
        _training_in_words(found),
    ]
    return Padding(Text(" ".join(sentences)), (0, 1, 1, 1))


def _gradients_in_words(found: Demonstration) -> str:
    differing = [way.label for way in found.ways if not way.gradients_equal]
    if differing:
        return f"Gradients differ from the plain step's: {', '.join(differing)}."
    return "All gradients are those of the plain step, bit for bit."


def _training_in_words(found: Demonstration) -> str:
    num_steps = len(found.plain_losses)
    start, end = found.plain_losses[0], found.plain_losses[-1]
    if found.plain_losses == found.planned_losses:
        compared = "and the smallest plan gives the same loss at every step, to the last bit"
    else:
        compared = f"and {found.planned_losses[-1]:.3f} by the smallest plan"
    return f"Trained for {num_steps} steps on generated text, the loss goes from {start:.2f} to {end:.2f}, {compared}."
