"""Price sweeps: from holding everything to replaying everything, along the lower hull of the trade-off.

For one price per byte, the best set of values to hold is a minimum cut (`min_cut`). Identical blocks all change at one
price. So what lies earlier in the step is priced a little higher (``tilt``), which makes blocks change one by one, the
earliest first: those are held the longest, and when the backward pass replays them, everything later is freed already.
A strong tilt recomputes the first blocks only: what a low budget needs where a replay itself takes much memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from memfit.planning.candidates.min_cut import Cut, HoldOrReplay
from memfit.planning.candidates.pool import Pool
from memfit.planning.step import Step
from memfit.planning.step.block_values import BlockValues
from memfit.planning.step.recording import USUAL_COSTS

# How much higher the first value of the step is priced than the last, and the share of the cuts that each tilt gets.
_TILTS = ((0.03, 0.65), (0.5, 0.2), (3.0, 0.15))
# How many cuts a step of one op could pay for, and the limits to their number.
_EFFORT_OPS, _FEWEST_CUTS, _MOST_CUTS = 110_000, 40, 250
_LAUNCH_TILT = 0.03
# Into so many equal parts the blocks are divided of which only the first ones are recorded.
_NUM_PARTS = 8


def price_sweeps(pool: Pool) -> Iterator[frozenset[int]]:
    """Yield the corners of the hull, for several tilts.

    Leaving this out costs 3 to 9 points of overhead (`benchmarks/ablation.py`).
    """
    graph = HoldOrReplay(pool.step, pool.step.last_time_before_reads, pool.may_be_recomputed)
    num_cuts = _num_cuts(pool.step)
    for tilt, share in _TILTS:
        yield from (cut.recomputed for cut in swept_cuts(pool.step, graph, tilt=tilt, most_cuts=int(num_cuts * share)))


def launch_sweeps(pool: Pool) -> Iterator[frozenset[int]]:
    """Yield the corners of hulls at which each op costs what the host spends on it, for launch-bound steps.

    There it counts how many ops are recorded and replayed, not which: so each op costs the same, alone and together
    with its own seconds, in the whole model and in its first blocks only; then the others need no recording at all.
    """
    step = pool.step
    if not step.time.launches_may_matter:
        return
    costs = step.profile.host or USUAL_COSTS
    host_seconds = costs.recorded_op + costs.dropped_op + costs.module_entry + costs.hooked_save + costs.replayed_op
    on_host = [host_seconds] * step.num_ops
    on_both = [host_seconds + seconds for seconds in step.replay_seconds]
    num_blocks, blocks = len(step.profile.blocks), BlockValues(step)
    nums_first = sorted({num_blocks * part // _NUM_PARTS for part in range(1, _NUM_PARTS)} - {0})
    choices = [blocks.made_in(range(num_first)) & pool.may_be_recomputed for num_first in nums_first]
    choices.append(set(pool.may_be_recomputed))
    most_cuts = max(_num_cuts(step) // (4 * len(choices)), 6)
    for values in choices:
        for op_seconds in (on_host, on_both):
            graph = HoldOrReplay(step, step.last_time_before_reads, values, op_seconds)
            yield from (cut.recomputed for cut in swept_cuts(step, graph, tilt=_LAUNCH_TILT, most_cuts=most_cuts))


def _num_cuts(step: Step) -> int:
    return min(max(_EFFORT_OPS // max(step.num_ops, 1), _FEWEST_CUTS), _MOST_CUTS)


class _Point(NamedTuple):
    cut: Cut
    weighted_bytes: float


def swept_cuts(step: Step, graph: HoldOrReplay, *, tilt: float, most_cuts: int) -> Iterator[Cut]:
    """Yield at most ``most_cuts`` corners of the hull, splitting first where neighbours differ most in seconds."""
    if not graph.values:
        return
    earliness = 1 - np.clip(np.array(step.value_op, dtype=np.float64), 0, None) / max(step.close_time, 1)
    weighted = np.array(step.value_bytes, dtype=np.float64) * (1 + tilt * np.clip(earliness, 0, 1))

    def point_at(price: float) -> _Point:
        cut = graph.cut(lambda values: price * weighted[values])
        return _Point(cut, float(weighted[list(cut.held)].sum()))

    first, last = point_at(0.0), point_at(graph.highest_price)
    yield first.cut
    yield last.cut
    num_cuts, serial = 2, 0
    segments = [(first.cut.seconds - last.cut.seconds, serial, first, last)]
    while segments and num_cuts < most_cuts:
        _, _, low, high = heapq.heappop(segments)
        if high.cut.seconds <= low.cut.seconds or low.weighted_bytes <= high.weighted_bytes:
            continue
        price = (high.cut.seconds - low.cut.seconds) / (low.weighted_bytes - high.weighted_bytes)
        middle = point_at(price)
        num_cuts += 1
        chord = low.cut.seconds + price * low.weighted_bytes
        # Below a billionth of the chord it is the rounding of prices, not another corner.
        if middle.cut.seconds + price * middle.weighted_bytes >= chord * (1 - 1e-9):
            continue
        yield middle.cut
        for left, right in ((low, middle), (middle, high)):
            serial += 1
            heapq.heappush(segments, (left.cut.seconds - right.cut.seconds, serial, left, right))
