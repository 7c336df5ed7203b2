"""Sweeps the price of a byte: from holding everything to replaying everything, along the lower hull of the trade-off.

Identical blocks change their minds at one and the same price, all together. So what lies earlier in the step is priced
a little higher (``tilt``), which makes blocks change one by one, the earliest first: they are held the longest, and
when the backward pass comes to replay them, everything behind them is gone already. A strong tilt gives plans that
leave the last blocks alone and are hard on the first: what a low budget asks for where a replay itself takes much.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from memfit.planning.candidates.min_cut import Cut, HoldOrReplay
from memfit.planning.step import Step


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
