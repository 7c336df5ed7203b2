"""Runs the sizes that are expected to train fastest, and corrects what was predicted of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

from memfit.tuning.tuned import TunedSize

# So many of the sizes that are predicted to be fastest are run. Running more, by what the first ones showed, chose the
# same size for each of eight models and budgets.
_NUM_RUN = 3


def run_fastest(rows: dict[int, TunedSize], run: Callable[[TunedSize], TunedSize]) -> None:
    """Replace the ``rows`` that are predicted to be fastest by what ``run`` measures, and scale the others as these."""
    ratios: list[float] = []
    while len(ratios) < _NUM_RUN:
        row = max(
            (row for row in rows.values() if row.plan is not None and row.throughput and not row.is_measured),
            key=lambda row: row.throughput,
            default=None,
        )
        if row is None:
            break
        rows[row.size] = run(row)
        if rows[row.size].plan is None:
            leave_out_larger(rows, row.size)
        else:
            ratios.append(rows[row.size].throughput / row.throughput)
    factor = median(ratios) if ratios else 1.0
    for size, row in rows.items():
        if row.seconds is not None and not row.is_measured:
            rows[size] = replace(row, seconds=row.seconds / factor, throughput=row.throughput * factor)


def leave_out_larger(rows: dict[int, TunedSize], size: int) -> None:
    """Let no size above one that ran out of memory be chosen."""
    for row in list(rows.values()):
        if row.size > size and row.plan is not None:
            rows[row.size] = failed(row, f"size {size} ran out of memory")


def failed(row: TunedSize, problem: str) -> TunedSize:
    """Return the row of a size that does not count, because of ``problem``."""
    return replace(row, plan=None, seconds=None, throughput=0.0, problem=problem)


def measured(row: TunedSize, peak_bytes: int, seconds: float) -> TunedSize:
    """Return the row of a size that was run."""
    return replace(row, peak_bytes=peak_bytes, seconds=seconds, throughput=row.size / seconds, is_measured=True)
