"""Runs the sizes that are expected to train fastest, and corrects what was predicted of the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from memfit.tuning.tuned import TunedSize

# So many of the sizes that are predicted to be fastest are run, no more than the fewest after so many seconds.
_FEWEST_RUN, _MOST_RUN = 3, 6
_RUNNING_SECONDS = 45.0


class Corrections:
    """How much more samples per second sizes that were run have had than was predicted.

    Sizes that run plain are corrected by such alone, because what plans add takes longer than predicted where steps are
    short.
    """

    def __init__(self) -> None:
        self._factors: dict[bool, dict[int, float]] = {True: {}, False: {}}

    def add(self, predicted: TunedSize, measured: TunedSize) -> None:
        """Take a size into account that was run."""
        if predicted.plan is not None and predicted.throughput:
            factors = self._factors[predicted.plan.changes_anything]
            factors[predicted.size] = measured.throughput / predicted.throughput

    def factor(self, row: TunedSize) -> float:
        """Return the factor of the closest size that was run; 1 where none was."""
        factors = self._factors[row.plan is not None and row.plan.changes_anything]
        closest = min(factors, key=lambda size: max(size, row.size) / min(size, row.size), default=None)
        return 1.0 if closest is None else factors[closest]


def correct(rows: dict[int, TunedSize], corrections: Corrections) -> None:
    """Correct what was predicted of the sizes that were not run."""
    for size, row in rows.items():
        factor = corrections.factor(row)
        if row.seconds is not None and not row.is_measured and factor:
            rows[size] = replace(row, seconds=row.seconds / factor, throughput=row.throughput * factor)


def run_fastest(rows: dict[int, TunedSize], run: Callable[[TunedSize], TunedSize]) -> Corrections:
    """Replace those ``rows`` by what ``run`` measures that may be the fastest, until no other is expected to be.

    Return how predictions are to be corrected, as those of sizes to run next are.
    """
    begin = time.monotonic()
    corrections = Corrections()
    for num_run in range(_MOST_RUN):
        expected = {
            row.size: row.throughput * corrections.factor(row)
            for row in rows.values()
            if row.plan is not None and not row.is_measured
        }
        if not expected:
            break
        size = max(expected, key=lambda size: expected[size])
        fastest = max((row.throughput for row in rows.values() if row.is_measured), default=0.0)
        is_late = time.monotonic() - begin > _RUNNING_SECONDS
        if num_run >= _FEWEST_RUN and (is_late or expected[size] <= fastest):
            break
        predicted = rows[size]
        rows[size] = run(predicted)
        if rows[size].plan is None:
            leave_out_larger(rows, size)
        else:
            corrections.add(predicted, rows[size])
    return corrections


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
