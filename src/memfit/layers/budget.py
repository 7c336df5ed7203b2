"""The cheapest layers to drop under a budget in bytes. Numbers in, numbers out.

A plan needs the bytes it saves and, on top, its largest dropped layer. So the largest dropped layer frees nothing, and
the others free their bytes: what is left is a knapsack problem, to free the bytes over the budget at the least cost.
A dynamic program decides on the layers from the largest to the smallest, so that the first one that it drops is the
largest. Its states are the bytes freed and the cost so far. A state leaves the list where another one frees at least
its bytes at no more cost, or where its linear relaxation, which may drop parts of the remaining layers, costs more
than the best drop known (Kellerer, Pferschy and Pisinger, "Knapsack Problems", 2004, chapter 5). Rounded up, such a
relaxation is a drop.

A limit on the work turns the program into a beam search whose lost states still give a proven bound. Everything that
decides is in exact integers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.errors import InfeasibleBudgetError
from memfit.layers.strategies import Choice
from memfit.units import format_bytes

LARGEST_EXACT_NUM_LAYERS = 200
"""Up to this many layers the search goes on until the plan is proved to be the best."""

LARGEST_GAP = 1e-3
"""Beyond, it stops once the plan is proved to be within this share of the best, or where that takes too much work."""

# Counted in numbers looked at, so that the same input gives the same plan on every machine. A few tenths of a second
# for the first; the second only bounds instances made to be hard.
_USUAL_WORK = 5 * 10**6
_LARGEST_WORK = 5 * 10**7
# What a layer costs however few the states: two dozen NumPy calls take as long as this many numbers.
_WORK_PER_LAYER = 1000
_WIDEST_LIST_OF_STATES = 2**17
# What remains is sorted anew after each layer, and in longer lists than this after several.
_MOST_SORTINGS = 400
# Parts of a cost have a few roundings of 2**-53: with so much on the safe side, no bound is too high.
_FLOAT_SLACK = 2.0**-46

# int64 where every sum fits, else object arrays of Python ints: exact either way.
Numbers = npt.NDArray[Any]
Positions = npt.NDArray[np.intp]


def cheapest_drop(sizes_bytes: Sequence[int], flops: Sequence[int], budget_bytes: int) -> Choice:
    """Return the layers whose drop costs the least FLOPs such that saved bytes + largest dropped layer fit."""
    total_bytes = sum(sizes_bytes)
    if total_bytes <= budget_bytes:
        return Choice([], 0.0)
    # With every layer dropped the largest one is what remains, and no plan gets below it.
    minimum_bytes = max(sizes_bytes)
    if budget_bytes < minimum_bytes:
        raise InfeasibleBudgetError(
            f"the smallest budget for these layers is {format_bytes(minimum_bytes)} ({minimum_bytes} bytes), which the "
            f"largest layer alone needs when it is recomputed; the given one is {format_bytes(budget_bytes)} "
            f"({budget_bytes} bytes)",
            minimum_bytes=minimum_bytes,
        )
    # In their greatest common units, more numbers fit 64 bits and bounds can be rounded further.
    size_unit, cost_unit = math.gcd(*sizes_bytes), math.gcd(*flops) or 1
    positions = sorted((i for i, size in enumerate(sizes_bytes) if size), key=sizes_bytes.__getitem__, reverse=True)
    search = _DropSearch(
        [sizes_bytes[i] // size_unit for i in positions],
        [flops[i] // cost_unit for i in positions],
        excess=-(-(total_bytes - budget_bytes) // size_unit),
    )
    proven = search.run(_LARGEST_WORK if len(sizes_bytes) <= LARGEST_EXACT_NUM_LAYERS else _USUAL_WORK)
    gap = (search.best_cost - proven) / max(proven, 1)
    return Choice(_earliest_of_equals([positions[i] for i in search.best_drop], sizes_bytes, flops), gap)


class _Remaining:
    """The layers from ``start`` on by ascending cost per byte, and what the first of them free and cost together."""

    def __init__(self, start: int, layers: Positions, sizes: Numbers, costs: Numbers) -> None:
        self.start, self.layers = start, layers
        self.freed, self.cost = (np.insert(np.cumsum(each[layers]), 0, 0) for each in (sizes, costs))
        # Where none is dropped, there is no last one, and no part of it.
        self.ratio_of_last = np.insert(costs[layers].astype(np.float64) / sizes[layers].astype(np.float64), 0, 0.0)

    def enough(self, missing: Numbers) -> tuple[Positions, Positions]:
        """Return where all layers together free what is missing, and how many of the first do so there."""
        num_dropped = np.searchsorted(self.freed, missing)
        possible = np.flatnonzero(num_dropped < len(self.freed))
        return possible, num_dropped[possible]

    def least_cost(self, missing: Numbers, num_dropped: Positions) -> Numbers:
        """Return the least that freeing so much costs if a part of the last dropped layer may be dropped."""
        surplus = (self.freed[num_dropped] - missing).astype(np.float64)
        spared = (1 + _FLOAT_SLACK) * surplus * self.ratio_of_last[num_dropped]
        is_object = self.cost.dtype == np.object_
        return self.cost[num_dropped] - (np.frompyfunc(int, 1, 1)(spared) if is_object else spared.astype(np.int64))


class _DropSearch:
    """The dynamic program over layers from the largest to the smallest, and the best drop that is known."""

    def __init__(self, sizes: list[int], costs: list[int], excess: int) -> None:
        dtype = np.int64 if max(sum(sizes), sum(costs)) < 2**62 else np.object_
        self.sizes, self.costs = np.array(sizes, dtype=dtype), np.array(costs, dtype=dtype)
        # NumPy is as much slower with Python's integers.
        self.work_per_number = 1 if dtype == np.int64 else 20
        self.by_ratio = np.array(_by_ratio(sizes, costs))
        self.excess = excess
        # Dropping everything always fits.
        self.best_drop: Sequence[int] = range(len(sizes))
        self.best_cost, self.best_freed = sum(costs), sum(sizes[1:])
        self.state_freed, self.state_costs = np.zeros(0, dtype=dtype), np.zeros(0, dtype=dtype)
        # For each layer, which state before it each state after it came from. Numbers past the end of the old list
        # say that the layer was dropped, too; the number past all of these, that it was the first.
        self.origins: list[Positions] = []

    def run(self, usual_work: int) -> int:
        """Find the best drop, or after the usual work one near enough; return what no drop costs less than."""
        num_layers = len(self.sizes)
        stride = -(-num_layers // _MOST_SORTINGS)
        starts = range(0, num_layers, stride)
        proven = min(self._try_largest(first, stride) for first in starts)
        work = num_layers * len(starts)
        remaining = self._remaining(0)
        lowest_pruned = self.best_cost
        for layer in range(num_layers):
            if work > usual_work and self.best_cost - proven <= LARGEST_GAP * proven:
                return proven
            if (layer + 1) % stride == 0 or layer + 1 == num_layers:
                remaining = self._remaining(layer + 1)
            self._branch_on(layer)
            work += _WORK_PER_LAYER + 2 * len(self.state_freed) * self.work_per_number
            widest = _WIDEST_LIST_OF_STATES if work < _LARGEST_WORK else 0
            lowest_pruned = min(lowest_pruned, self._prune(layer, remaining, widest))
        return max(proven, min(self.best_cost, lowest_pruned))

    def _remaining(self, start: int) -> _Remaining:
        return _Remaining(start, self.by_ratio[self.by_ratio >= start], self.sizes, self.costs)

    def _try_largest(self, first: int, num_layers: int) -> int:
        """Return the least that a drop costs whose largest layer is one of ``num_layers`` from ``first`` on.

        Try the drop that rounding up gives if the first of them is the largest.
        """
        remaining = self._remaining(first)
        smallest = min(first + num_layers, len(self.sizes)) - 1
        missing = self.excess + self.sizes[[smallest, first]]
        possible, num_dropped = remaining.enough(missing)
        if len(possible) == 2:
            drop = remaining.layers[: num_dropped[1]]
            freed = remaining.freed[num_dropped[1]] - self.sizes[drop].max()
            if self._is_better(int(remaining.cost[num_dropped[1]]), int(freed)):
                self.best_drop = drop.tolist()
        if not len(possible):
            return self.best_cost
        return int(remaining.least_cost(missing[:1], num_dropped[:1])[0])

    def _branch_on(self, layer: int) -> None:
        """Let each state drop the layer or not, and begin one with it; leave out what another one dominates."""
        size, cost = self.sizes[layer], self.costs[layer]
        freed = np.concatenate((self.state_freed, self.state_freed + size, [0 * size]))
        costs = np.concatenate((self.state_costs, self.state_costs + cost, [cost]))
        # By cost, and of equal costs the one first that frees most: each has to free more than all before it.
        order = np.lexsort((-freed, costs))
        freed = freed[order]
        is_kept = np.ones(len(order), dtype=bool)
        is_kept[1:] = freed[1:] > np.maximum.accumulate(freed)[:-1]
        self.state_freed, self.state_costs = freed[is_kept], costs[order[is_kept]]
        self.origins.append(order[is_kept])

    def _prune(self, layer: int, remaining: _Remaining, widest: int) -> int:
        """Complete the states, and keep those that may be better than the best, up to ``widest`` of them.

        Return the lowest bound of the others.
        """
        missing = np.maximum(self.excess - self.state_freed, 0)
        possible, num_dropped = remaining.enough(missing)
        bounds = self.state_costs[possible] + remaining.least_cost(missing[possible], num_dropped)
        costs = self.state_costs[possible] + remaining.cost[num_dropped]
        freed = self.state_freed[possible] + remaining.freed[num_dropped]
        # Layers that are decided on already cannot complete a state.
        complete = np.flatnonzero((num_dropped == 0) | (remaining.start > layer))
        if len(complete):
            best = complete[np.lexsort((-freed[complete], costs[complete]))[0]]
            if self._is_better(int(costs[best]), int(freed[best])):
                self.best_drop = [*self._dropped_by(int(possible[best])), *remaining.layers[: num_dropped[best]]]
        by_bound = np.argsort(bounds, kind="stable")
        num_kept = min(int(np.searchsorted(bounds[by_bound], self.best_cost, side="right")), widest)
        kept = np.sort(possible[by_bound[:num_kept]])
        self.state_freed, self.state_costs = self.state_freed[kept], self.state_costs[kept]
        self.origins[-1] = self.origins[-1][kept]
        return int(bounds[by_bound[num_kept]]) if num_kept < len(bounds) else self.best_cost

    def _is_better(self, cost: int, freed: int) -> bool:
        """Take note of a drop if it is cheaper than the best, or as cheap with fewer bytes at the peak."""
        is_better = (cost, -freed) < (self.best_cost, -self.best_freed)
        if is_better:
            self.best_cost, self.best_freed = cost, freed
        return is_better

    def _dropped_by(self, state: int) -> list[int]:
        """Return the layers that a state of the last list drops."""
        dropped: list[int] = []
        for layer in range(len(self.origins) - 1, -1, -1):
            state = int(self.origins[layer][state])
            num_before = len(self.origins[layer - 1]) if layer else 0
            if state >= num_before:
                dropped.append(layer)
            if state == 2 * num_before:
                break
            state %= num_before
        return dropped


def _by_ratio(sizes: Sequence[int], costs: Sequence[int]) -> list[int]:
    """Return the positions in ascending order of cost per size, exactly; sizes are positive."""
    # Two different ratios differ by more than 2**-shift, so the integer part of ratio × 2**shift sorts exactly.
    shift = 2 * max(sizes).bit_length()
    ratio = [(cost << shift) // size for size, cost in zip(sizes, costs, strict=True)]
    return sorted(range(len(sizes)), key=ratio.__getitem__)


def _earliest_of_equals(
    dropped_positions: Sequence[int], sizes_bytes: Sequence[int], flops: Sequence[int]
) -> list[int]:
    """Return the same number of layers of each size and cost, but always the earliest ones."""
    still_to_drop = Counter((sizes_bytes[position], flops[position]) for position in dropped_positions)
    earliest = []
    for position, kind in enumerate(zip(sizes_bytes, flops, strict=True)):
        if still_to_drop[kind]:
            still_to_drop[kind] -= 1
            earliest.append(position)
    return earliest
