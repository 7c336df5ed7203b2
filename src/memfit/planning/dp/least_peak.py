"""The smallest peak of a step: sweeps with more and more rows, until what is found and what is proven meet.

A sweep that takes rows together finds a peak that no plan can stay below, and a plan, whose own peak may be higher. The
next one looks right there, for a plan that has no more than what is proven: few rows can become that, so that there is
room for them as they are. Then comes another pair with more rows. It looks only half way up to the smallest plan that
is known, where fewer rows are possible; if nothing is, that is proven, and the upper half is looked at. If such a sweep
tells less than was known before, its step has too many kinds of partial plans, and yet more rows would tell no more.
"""

from __future__ import annotations

from memfit.planning.candidates.trade_off import Candidate, TradeOff
from memfit.planning.dp.sweep_search import Sweeps

# How many rows there are at first, and how many times more in each further pair of sweeps.
FIRST_ROWS, GROWTH = 400, 4
# What deciding on an op costs beside what its rows do, in cells, and how many cells a row has at a guess.
_CELLS_OF_OP, _LIKELY_CELLS = 2_000, 6


def can_be_swept(sweeps: Sweeps, effort: int, num_rows: int = FIRST_ROWS) -> bool:
    """Return whether the effort is likely to be enough for a sweep of the whole step."""
    return sweeps.is_possible and (num_rows * _LIKELY_CELLS + _CELLS_OF_OP) * sweeps.num_ops <= effort


def least_peak(
    trade_off: TradeOff, sweeps: Sweeps, smallest: Candidate, least_bytes: int, effort: int
) -> tuple[Candidate, int]:
    """Return the smallest plan, starting from one that is known, and a peak that no plan can stay below.

    ``effort`` is in cells. Where it may not be enough for one more sweep, there is none.
    """
    num_rows, share, is_near = FIRST_ROWS, 1.0, False
    while least_bytes < smallest.peak_bytes and can_be_swept(sweeps, effort, num_rows):
        below_bytes = smallest.peak_bytes - 1 - least_bytes
        limit_bytes = least_bytes if is_near else least_bytes + int(below_bytes * share)
        plans, proven_bytes, cells_taken = sweeps.smallest(limit_bytes, num_rows, is_relaxed=not is_near)
        effort -= cells_taken + _CELLS_OF_OP * sweeps.num_ops
        is_hopeless = not is_near and num_rows > FIRST_ROWS and proven_bytes < least_bytes
        least_bytes = max(least_bytes, proven_bytes)
        smallest = min([smallest, *map(trade_off.add, plans)], key=lambda plan: (plan.peak_bytes, plan.added_seconds))
        if is_hopeless:
            break
        if is_near:
            num_rows, share, is_near = num_rows * GROWTH, 0.5, False
        elif proven_bytes > limit_bytes:
            share = 1.0
        else:
            is_near = True
    return smallest, least_bytes
