"""Minimum cuts of graphs, and the lower hull of a trade-off by cuts at rising prices. Numbers in, numbers out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

SOURCE, SINK = 0, 1
"""The nodes between which flows run."""


def maximum_flow_from(graph: csr_array) -> tuple[float, npt.NDArray[np.bool_]]:
    """Return the maximum flow from the source to the sink, and which nodes the source then still reaches."""
    result = maximum_flow(graph, SOURCE, SINK)
    residual = graph.astype(np.int64) - result.flow
    residual.data[residual.data < 0] = 0
    residual.eliminate_zeros()
    is_reached = np.zeros(graph.shape[0], dtype=bool)
    is_reached[breadth_first_order(residual, SOURCE, return_predecessors=False)] = True
    return float(result.flow_value), is_reached


_Cut = TypeVar("_Cut")


def hull(
    cut_at: Callable[[float], _Cut],
    seconds_of: Callable[[_Cut], float],
    bytes_of: Callable[[_Cut], float],
    highest_price: float,
    most_cuts: int,
) -> Iterator[tuple[float, _Cut]]:
    """Yield at most ``most_cuts`` prices per byte and their cuts: corners of the lower hull of seconds against bytes.

    It splits first where neighbours differ most in seconds.
    """
    first, last = cut_at(0.0), cut_at(highest_price)
    yield 0.0, first
    yield highest_price, last
    num_cuts = 2
    pending = [(seconds_of(first) - seconds_of(last), num_cuts, first, last)]
    while pending and num_cuts < most_cuts:
        _, _, low, high = heapq.heappop(pending)
        if seconds_of(high) <= seconds_of(low) or bytes_of(low) <= bytes_of(high):
            continue
        price = (seconds_of(high) - seconds_of(low)) / (bytes_of(low) - bytes_of(high))
        middle = cut_at(price)
        num_cuts += 1
        yield price, middle
        # Less than a billionth below the chord, it is the rounding of prices, not another corner.
        chord = seconds_of(low) + price * bytes_of(low)
        if seconds_of(middle) + price * bytes_of(middle) < chord * (1 - 1e-9):
            for number, (left, right) in enumerate(((low, middle), (middle, high))):
                heapq.heappush(pending, (seconds_of(left) - seconds_of(right), 2 * num_cuts + number, left, right))
