"""The cheapest layers to drop under a budget in bytes. Numbers in, numbers out.

A plan needs the bytes it saves and, on top, its largest dropped layer. With that largest size fixed to s,
what is left is a covering problem: of the layers no larger than s, drop the cheapest set that frees the
bytes over the budget and s besides. Charging s although all that is dropped is smaller only makes a plan
look worse than it is, and the right s is tried too; so the best over all s is the best of all.

Sizes are searched best first, by intervals: the layers no larger than the interval's largest size, and the
demand of its smallest, bound every size in between. Everything that decides is in exact integers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.errors import InfeasibleBudgetError
from memfit.layers.cover import Cover, Numbers, cheapest_cover, exact_dtype, find_break
from memfit.layers.strategies import Choice
from memfit.units import format_bytes

LARGEST_EXACT_NUM_LAYERS = 200
"""Up to this many layers the search goes on until the plan is proved to be the best."""

LARGEST_GAP = 1e-3
"""Beyond, it stops once the plan is proved to be within this share of the best, or where that takes too much work."""

# Counted in numbers looked at, so that the same input gives the same plan on every machine. A few tenths of a
# second for the first; the second only bounds instances made to be hard.
_USUAL_WORK = 5 * 10**6
_LARGEST_WORK = 10**8


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
    items = _sorted_items(sizes_bytes, flops, excess_bytes=total_bytes - budget_bytes)
    found = _DropSearch(items, is_exact=len(sizes_bytes) <= LARGEST_EXACT_NUM_LAYERS).run()
    return Choice(_earliest_of_equals(found.dropped_positions, sizes_bytes, flops), found.optimality_gap)


@dataclass(frozen=True)
class _Items:
    """Layers that hold bytes, by ascending FLOPs per byte, with sizes and costs in their greatest common units."""

    positions: list[int]
    sizes: Numbers
    costs: Numbers
    excess: int


def _sorted_items(sizes_bytes: Sequence[int], flops: Sequence[int], excess_bytes: int) -> _Items:
    size_unit, cost_unit = math.gcd(*sizes_bytes), math.gcd(*flops) or 1
    sizes = [size // size_unit for size in sizes_bytes]
    costs = [cost // cost_unit for cost in flops]
    positions = [i for i, size in enumerate(sizes) if size]
    by_ratio = _by_ratio([sizes[i] for i in positions], [costs[i] for i in positions])
    positions = [positions[i] for i in by_ratio]
    dtype = exact_dtype(max(sum(sizes), sum(costs)))
    return _Items(
        positions,
        np.array([sizes[i] for i in positions], dtype=dtype),
        np.array([costs[i] for i in positions], dtype=dtype),
        excess=-(-excess_bytes // size_unit),
    )


def _by_ratio(sizes: Sequence[int], costs: Sequence[int]) -> list[int]:
    """Return the positions in ascending order of cost per size, exactly; sizes are positive."""
    # Two different ratios differ by more than 2**-shift, so the integer part of ratio × 2**shift sorts exactly.
    shift = 2 * max(sizes).bit_length()
    ratio = [(cost << shift) // size for size, cost in zip(sizes, costs, strict=True)]
    return sorted(range(len(sizes)), key=ratio.__getitem__)


class _DropSearch:
    """Best-first search over the size of the largest dropped layer."""

    def __init__(self, items: _Items, *, is_exact: bool) -> None:
        self.items, self.is_exact = items, is_exact
        self.largest_sizes = [int(size) for size in np.unique(items.sizes)]
        # Dropping everything always fits.
        self.best = Cover(np.arange(len(items.positions)), int(items.sizes.sum()), int(items.costs.sum()))
        self.best_largest = self.largest_sizes[-1]
        self.work = 0

    def run(self) -> Choice:
        open_intervals: list[tuple[int, int, int]] = []
        self._open(0, len(self.largest_sizes) - 1, open_intervals)
        proven = self.best.cost
        while open_intervals:
            lower_bound, first, last = heapq.heappop(open_intervals)
            if lower_bound > self.best.cost or (lower_bound == self.best.cost and not self.is_exact):
                break
            if self._is_done(min(lower_bound, proven)):
                proven = min(lower_bound, proven)
                break
            if first == last:
                proven = min(proven, max(lower_bound, self._solve(self.largest_sizes[first])))
            else:
                middle = (first + last) // 2
                self._open(first, middle, open_intervals)
                self._open(middle + 1, last, open_intervals)
        proven = min(proven, self.best.cost)
        gap = 0.0 if proven == self.best.cost else (self.best.cost - proven) / proven
        return Choice([self.items.positions[i] for i in self.best.positions], gap)

    def _is_done(self, proven: int) -> bool:
        return self.work > _LARGEST_WORK or (self.work > _USUAL_WORK and not self._is_too_loose(proven))

    def _is_too_loose(self, proven: int) -> bool:
        """Return whether a plan proved to cost at least ``proven`` could be further from the best than is allowed."""
        return self.best.cost - proven > (0 if self.is_exact else LARGEST_GAP * proven)

    def _open(self, first: int, last: int, open_intervals: list[tuple[int, int, int]]) -> None:
        """Bound the sizes ``first`` to ``last``, and try what rounding the bound up gives for the last one."""
        smallest, largest = self.largest_sizes[first], self.largest_sizes[last]
        is_allowed = self.items.sizes <= largest
        sizes = np.where(is_allowed, self.items.sizes, 0)
        costs = np.where(is_allowed, self.items.costs, 0)
        self.work += len(sizes)
        rounded = find_break(sizes, costs, self.items.excess + largest)
        if rounded is not None:
            taken = np.flatnonzero(is_allowed[: rounded.position + 1])
            self._offer(Cover(taken, int(sizes[taken].sum()), int(costs[taken].sum())), largest)
        relaxed = rounded if first == last else find_break(sizes, costs, self.items.excess + smallest)
        if relaxed is not None:
            heapq.heappush(open_intervals, (relaxed.lower_bound, first, last))

    def _solve(self, largest: int) -> int:
        """Search the covers whose items are no larger than ``largest``; return a proven bound on their cost."""
        allowed = np.flatnonzero(self.items.sizes <= largest)
        # What the best plan would weigh here if it had the same peak; it decides between equal costs.
        weight_to_beat = self.best.weight - self.best_largest + largest
        search = cheapest_cover(
            self.items.sizes[allowed],
            self.items.costs[allowed],
            demand=self.items.excess + largest,
            known_cost=self.best.cost,
            known_weight=weight_to_beat,
            work_limit=_LARGEST_WORK - self.work if self.is_exact else _USUAL_WORK,
        )
        self.work += search.work
        if search.best is not None:
            cover = search.best
            self._offer(Cover(allowed[cover.positions], cover.weight, cover.cost), largest)
        return search.lower_bound

    def _offer(self, cover: Cover, largest: int) -> None:
        """Take ``cover`` if it is cheaper than the best, or as cheap with fewer bytes at the peak."""
        if (cover.cost, largest - cover.weight) < (self.best.cost, self.best_largest - self.best.weight):
            self.best, self.best_largest = cover, largest


def _earliest_of_equals(
    dropped_positions: Sequence[int], sizes_bytes: Sequence[int], flops: Sequence[int]
) -> list[int]:
    """Return the same number of layers of each size and cost, but always the earliest ones."""
    still_to_drop: dict[tuple[int, int], int] = {}
    for position in dropped_positions:
        kind = (sizes_bytes[position], flops[position])
        still_to_drop[kind] = still_to_drop.get(kind, 0) + 1
    earliest = []
    for position, kind in enumerate(zip(sizes_bytes, flops, strict=True)):
        if still_to_drop.get(kind, 0):
            still_to_drop[kind] -= 1
            earliest.append(position)
    return earliest
