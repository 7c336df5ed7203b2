"""Price sweeps: from holding everything to replaying everything, along the lower hull of the trade-off.

For one price per byte, the best set of values to hold is a minimum cut (`min_cut`). Identical blocks all change at one
price. So what lies earlier in the step is priced a little higher (``tilt``), which makes blocks change one by one, the
earliest first: those are held the longest, and when the backward pass replays them, everything later is freed already.
A strong tilt recomputes the first blocks only: what a low budget needs where a replay itself takes much memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memfit.planning.candidates.min_cut import HoldOrReplay
from memfit.planning.candidates.pool import Pool

# How much higher the first value of the step is priced than the last, and how many cuts of such a sweep a step of one
# op could pay for.
_TILTS = ((0.03, 70_000), (0.5, 22_000), (3.0, 17_000))
_FEWEST_CUTS, _MOST_CUTS = 8, 160


def price_sweeps(pool: Pool) -> Iterator[frozenset[int]]:
    """Yield the corners of the hull, for several tilts.

    Leaving this out costs 1.3 points of overhead on average, and up to 4 (`benchmarks/ablation.py`).
    """
    step = pool.step
    graph = HoldOrReplay(step, step.last_time_before_reads, pool.may_be_recomputed)
    earliness = np.clip(1 - np.array(step.value_op) / max(step.close_time, 1), 0, 1)
    for tilt, effort_ops in _TILTS:
        weights = np.array(step.value_bytes) * (1 + tilt * earliness)
        num_cuts = min(max(effort_ops // max(step.num_ops, 1), _FEWEST_CUTS), _MOST_CUTS)
        yield from (cut.recomputed for _, cut in graph.corners(weights, num_cuts))
