"""What ``tune`` returns: the batch size that trains fastest, and what was tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memfit.fitted import Fitted
from memfit.graph.plan import Plan
from memfit.graph.summaries import html_summary, text_summary
from memfit.units import format_bytes, format_rate, format_seconds


@dataclass(frozen=True, slots=True)
class TunedSize:
    """One batch size that was tried.

    ``peak_bytes``, ``seconds`` of a step and ``throughput`` in samples per second were measured where ``is_measured``,
    else they are predicted. ``plan`` is None for a size that no plan keeps within the budget; it has no seconds, and
    its throughput is 0, and ``problem`` says why. With a global batch, ``accumulation`` is how many steps make up one.
    """

    size: int
    peak_bytes: int | None
    seconds: float | None
    throughput: float
    plan: Plan | None
    is_measured: bool = False
    accumulation: int = 1
    problem: str = ""

    @property
    def peak(self) -> int | None:
        """The peak in bytes."""
        return self.peak_bytes

    def __str__(self) -> str:
        if self.plan is None or self.peak_bytes is None or self.seconds is None:
            return self.problem or "not within the budget"
        steps = f", {self.accumulation} steps" if self.accumulation > 1 else ""
        how = "measured" if self.is_measured else "predicted"
        rate, peak = format_rate(self.throughput), format_bytes(self.peak_bytes)
        return f"{rate} samples/s, {peak}, {format_seconds(self.seconds)} per step{steps} ({how})"


@dataclass(frozen=True, slots=True, repr=False)
class Tuned:
    """The batch size with the most samples per second within the budget, and what was tried.

    ``throughput`` is in samples per second. ``fitted`` has the plan for that size, which is applied to the model.
    ``accumulation`` is how many steps of that size make up the global batch; 1 where none was given.
    """

    size: int
    throughput: float
    fitted: Fitted
    table: tuple[TunedSize, ...]
    accumulation: int = 1

    def summary_lines(self) -> dict[str, str]:
        """Return the result and a line for each size that was tried."""
        lines = {"size": f"{self.size}, {format_rate(self.throughput)} samples/s"}
        if self.accumulation > 1:
            lines["steps"] = f"{self.accumulation} for a global batch of {self.accumulation * self.size}"
        return lines | {f"{row.size}": str(row) for row in self.table}

    def __repr__(self) -> str:
        return text_summary("Tuned", self.summary_lines())

    def _repr_html_(self) -> str:
        return html_summary("Tuned", self.summary_lines())

    def document(self) -> dict[str, Any]:
        """Return the result as plain data: what ``--json`` prints, and the points of a curve."""
        return {
            "size": self.size,
            "throughput": self.throughput,
            "accumulation": self.accumulation,
            "budget_bytes": self.fitted.plan.budget_bytes,
            "table": [
                {
                    "size": row.size,
                    "peak_bytes": row.peak_bytes,
                    "seconds": row.seconds,
                    "throughput": row.throughput,
                    "predicted_overhead": None if row.plan is None else row.plan.predicted_overhead,
                    "is_measured": row.is_measured,
                    "accumulation": row.accumulation,
                    "problem": row.problem,
                }
                for row in self.table
            ],
        }
