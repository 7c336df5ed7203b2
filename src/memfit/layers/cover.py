"""The cheapest set of items whose weights reach a demand: the 0-1 knapsack, seen from the items left out.

After Pisinger, "A minimal algorithm for the 0-1 knapsack problem" (Operations Research 45, 1997), turned round from
packing to covering. Items come sorted by cost per weight. Taking them in that order until the demand is reached gives
the *break* solution; the best one differs from it in a few items near the break. So a list of states, each a total
weight and cost, grows outwards from the break, one item at a time, and a state leaves the list where another one has
at least its weight at no more cost, or where the linear relaxation shows that it cannot beat the best solution known.

Deviations: states are NumPy arrays and not a linked list; a limit on the work turns the search into a beam search
whose lost states still give a proven bound. Instances made to be hard (costs equal to sizes, or to sizes plus a
constant, with nine random digits) reach the limit already with 200 items; lists whose costs vary, or whose kinds
repeat, are solved in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# int64 where every sum fits, else object arrays of Python ints: exact either way.
Numbers = npt.NDArray[Any]

# Bounds are computed in floats. Each carries at most a handful of roundings of 2**-53 of its terms, so this share of
# their size on the safe side never discards a state that an exact bound would keep.
_FLOAT_SLACK = 2.0**-46
_WIDEST_LIST_OF_STATES = 2**17
# What an item costs however few the states: a dozen NumPy calls take as long as this many numbers.
_WORK_PER_ITEM = 1000


def exact_dtype(largest_sum: int) -> type[np.int64] | type[np.object_]:
    """Return the dtype in which sums up to ``largest_sum`` stay exact."""
    return np.int64 if largest_sum < 2**62 else np.object_


@dataclass(frozen=True)
class Break:
    """Where taking items in order first reaches the demand, and the bound that the linear relaxation gives there.

    Items before ``position`` weigh ``weight_before`` (short of the demand) and cost ``cost_before``; with the item at
    ``position`` the demand is reached. No cover costs less than ``lower_bound``.
    """

    position: int
    weight_before: int
    cost_before: int
    lower_bound: int


@dataclass(frozen=True)
class Cover:
    """A set of items that reaches the demand: positions in the given order, total weight and cost."""

    positions: npt.NDArray[np.intp]
    weight: int
    cost: int


@dataclass(frozen=True)
class CoverResult:
    """What the search found better than it was given, if anything, and what it proved: no cover costs less than
    ``lower_bound`` unless it was known before. ``work`` counts the states looked at."""

    best: Cover | None
    lower_bound: int
    work: int


def find_break(weights: Numbers, costs: Numbers, demand: int) -> Break | None:
    """Return the break for ``demand`` of items in order of cost per weight, or None where all together are too light.

    Items of weight 0 are allowed where their cost is 0 too: they stand for items taken out.
    """
    cumulative = np.cumsum(weights)
    position = int(np.searchsorted(cumulative, demand))
    if position == len(weights):
        return None
    weight_before = int(cumulative[position - 1]) if position else 0
    cost_before = int(costs[:position].sum())
    missing_cost = -((weight_before - demand) * int(costs[position]) // int(weights[position]))
    return Break(position, weight_before, cost_before, cost_before + missing_cost)


def cheapest_cover(
    weights: Numbers,
    costs: Numbers,
    demand: int,
    known_cost: int,
    known_weight: int,
    work_limit: int,
) -> CoverResult:
    """Return the cover of least cost, and of such covers the one of most weight, if it beats the one known.

    ``weights`` are positive, and items are in ascending order of cost per weight. ``known_cost`` and ``known_weight``
    are those of a cover found elsewhere: only a cheaper one, or a heavier one of the same cost, is of interest.
    """
    start = find_break(weights, costs, demand)
    if start is None or start.lower_bound > known_cost:
        return CoverResult(None, known_cost if start is None else start.lower_bound, len(weights))
    search = _CoverSearch(weights, costs, demand, start, known_cost, known_weight)
    return search.run(work_limit)


class _CoverSearch:
    """The growing list of states. Weights and costs in it are relative to the break solution's."""

    def __init__(
        self, weights: Numbers, costs: Numbers, demand: int, start: Break, known_cost: int, known_weight: int
    ) -> None:
        self.weights, self.costs, self.start = weights, costs, start
        self.deficit_at_start = demand - start.weight_before
        self.best_cost = known_cost - start.cost_before
        self.best_weight = known_weight - start.weight_before
        self.best_changes: list[int] | None = None
        self.state_weights = np.zeros(1, dtype=weights.dtype)
        self.state_costs = np.zeros(1, dtype=costs.dtype)
        # For each item looked at: its position, and for each state after it, which state before it came from;
        # numbers past the end of the old list say that the item changed sides.
        self.history: list[tuple[int, npt.NDArray[np.int32]]] = []
        self.lost_bound: float | None = None

    def run(self, work_limit: int) -> CoverResult:
        weights_as_float = self.weights.astype(np.float64)
        costs_as_float = self.costs.astype(np.float64)
        ratios = costs_as_float / weights_as_float
        # What it costs at least, on top of the linear relaxation, to put an item on the other side of the break.
        break_ratio = ratios[self.start.position]
        relaxed_cost = break_ratio * float(self.deficit_at_start)
        terms = costs_as_float + break_ratio * weights_as_float
        penalties = np.abs(costs_as_float - break_ratio * weights_as_float)
        bounds = relaxed_cost + penalties - _FLOAT_SLACK * (relaxed_cost + terms)

        candidates = np.flatnonzero(bounds <= self._threshold())
        split = int(np.searchsorted(candidates, self.start.position))
        left, right = candidates[:split][::-1], candidates[split:]
        work = len(self.weights)
        next_left = next_right = 0
        while len(self.state_weights) and (next_left < len(left) or next_right < len(right)):
            takes_right = (next_right <= next_left and next_right < len(right)) or next_left >= len(left)
            if takes_right:
                item, next_right = int(right[next_right]), next_right + 1
            else:
                item, next_left = int(left[next_left]), next_left + 1
            if bounds[item] > self._threshold():
                continue  # A better cover has been found since: this item stays on its side.
            work += _WORK_PER_ITEM + 2 * len(self.state_weights)
            self._branch_on(item, adds=takes_right)
            self._note_best()
            self._prune(
                ratio_to_add=float(ratios[right[next_right]]) if next_right < len(right) else None,
                ratio_to_remove=float(ratios[left[next_left]]) if next_left < len(left) else None,
                widest=_WIDEST_LIST_OF_STATES if work < work_limit else 0,
            )
        proven = self.best_cost
        if self.lost_bound is not None:
            relaxed = self.start.lower_bound - self.start.cost_before
            proven = min(proven, max(relaxed, int(np.ceil(self.lost_bound))))
        return CoverResult(self._best_cover(), self.start.cost_before + proven, work)

    def _branch_on(self, item: int, *, adds: bool) -> None:
        sign = 1 if adds else -1
        weights = np.concatenate((self.state_weights, self.state_weights + sign * self.weights[item]))
        costs = np.concatenate((self.state_costs, self.state_costs + sign * self.costs[item]))
        by_cost = np.argsort(costs, kind="stable")
        weights, costs = weights[by_cost], costs[by_cost]
        heaviest = np.maximum.accumulate(weights)
        is_kept = np.ones(len(weights), dtype=bool)
        is_kept[1:] = (weights[1:] > heaviest[:-1]).astype(bool)
        weights, costs, origins = weights[is_kept], costs[is_kept], by_cost[is_kept]
        # Of equal costs the last is the heaviest now; the ones before it are dominated.
        is_last = np.ones(len(weights), dtype=bool)
        is_last[:-1] = (costs[1:] != costs[:-1]).astype(bool)
        self.state_weights, self.state_costs = weights[is_last], costs[is_last]
        self.history.append((item, origins[is_last].astype(np.int32)))

    def _note_best(self) -> None:
        # Weight rises with cost along the list, so the first state that reaches the demand is the cheapest.
        state = int(np.searchsorted(self.state_weights, self.deficit_at_start))
        if state == len(self.state_weights):
            return
        cost, weight = int(self.state_costs[state]), int(self.state_weights[state])
        if (cost, -weight) < (self.best_cost, -self.best_weight):
            self.best_cost, self.best_weight = cost, weight
            self.best_changes = self._trail(state)

    def _prune(self, *, ratio_to_add: float | None, ratio_to_remove: float | None, widest: int) -> None:
        """Drop the states that cannot beat the best; past ``widest``, also the least promising ones."""
        deficits = (self.deficit_at_start - self.state_weights).astype(np.float64)
        costs = self.state_costs.astype(np.float64)
        # A state short of the demand still buys weight, at best at the next ratio to the right; one past it can give
        # weight back, at best at the next ratio to the left.
        price_short = np.inf if ratio_to_add is None else ratio_to_add
        price_past = 0.0 if ratio_to_remove is None else ratio_to_remove
        with np.errstate(invalid="ignore"):
            completion = np.where(deficits > 0, deficits * price_short, deficits * price_past)
        bounds = costs + completion
        finite = np.where(np.isfinite(bounds), np.abs(costs) + np.abs(completion), 0.0)
        bounds = bounds - _FLOAT_SLACK * finite
        is_kept = bounds <= self._threshold()
        if np.count_nonzero(is_kept) > widest:
            kept = np.flatnonzero(is_kept)
            least_promising = kept[np.argsort(bounds[kept], kind="stable")[widest:]]
            lost_bound = float(bounds[least_promising].min())
            self.lost_bound = lost_bound if self.lost_bound is None else min(self.lost_bound, lost_bound)
            is_kept[least_promising] = False
        self.state_weights, self.state_costs = self.state_weights[is_kept], self.state_costs[is_kept]
        item, origins = self.history[-1]
        self.history[-1] = (item, origins[is_kept])

    def _threshold(self) -> float:
        return float(self.best_cost) + _FLOAT_SLACK * abs(float(self.best_cost))

    def _trail(self, state: int) -> list[int]:
        """Return the items that are on the other side than in the break solution, for a state of the last list."""
        changed: list[int] = []
        for step in range(len(self.history) - 1, -1, -1):
            item, origins = self.history[step]
            num_before = len(self.history[step - 1][1]) if step else 1
            state = int(origins[state])
            if state >= num_before:
                changed.append(item)
                state -= num_before
        return changed

    def _best_cover(self) -> Cover | None:
        if self.best_changes is None:
            return None
        is_taken = np.zeros(len(self.weights), dtype=bool)
        is_taken[: self.start.position] = True
        is_taken[self.best_changes] ^= True
        return Cover(
            np.flatnonzero(is_taken),
            weight=self.start.weight_before + self.best_weight,
            cost=self.start.cost_before + self.best_cost,
        )
