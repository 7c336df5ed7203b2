"""How fast any plan can be at most: a proven lower bound on the seconds that a budget costs.

Fix a time ``t``, an op after the last of the model's forward pass. Let ``F`` be the recipes that a plan runs after
``t``. A value that is still read after ``t`` is, when op ``t`` runs, either live or comes from a recipe in ``F``: if
it is saved, autograd holds it; if it was brought back before, it stays until autograd lets go of it. The same holds for
each value that a recipe in ``F`` starts from, because a recipe holds its inputs until it has run. So what is live at
``t`` beyond ``fixed_bytes(t)`` is at least the values needed after ``t`` that ``F`` does not make, and the plan's
seconds are at least those of ``F``. Any plan that fits a budget therefore is a feasible point of

    minimise seconds(F) subject to held bytes(F) ≤ budget - fixed_bytes(t)

and for every price λ ≥ 0 per byte its seconds are at least ``min over F of seconds(F) + λ · held bytes(F)``, which is a
minimum cut (``min_cut``), less ``λ · (budget - fixed_bytes(t))``. The bound is the largest of these over λ, found by
moving λ to the slope between the best cut that fits and the best one that does not, and over several ``t``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.planning.bounds.proofs import Line
from memfit.planning.candidates.min_cut import Cut, HoldOrReplay
from memfit.planning.step import NEVER, Step

_MOST_CUTS_PER_TIME = 12
_MOST_LINES_PER_TIME = 24


class LowerBound:
    """Lower bounds on the recompute seconds of plans for one step. Graphs are built once for each time."""

    def __init__(self, step: Step, may_be_recomputed: Set[int]) -> None:
        self._step = step
        self._may_be_recomputed = may_be_recomputed
        self._graphs: dict[int, HoldOrReplay] = {}
        self._bytes = np.array(step.value_bytes, dtype=np.float64)

    def seconds(self, budget_bytes: int, times: Iterable[int]) -> float:
        """Return seconds that no plan within ``budget_bytes`` can stay below, looking at the given op indices."""
        usable = {time for time in times if self._step.close_time < time < self._step.num_ops}
        return max((self._seconds_at(budget_bytes, time) for time in usable), default=0.0)

    def graph_at(self, time: int) -> HoldOrReplay:
        """Return the graph of what is held and what is replayed after ``time``."""
        if time not in self._graphs:
            self._graphs[time] = HoldOrReplay(self._step, time, self._may_be_recomputed)
        return self._graphs[time]

    def _seconds_at(self, budget_bytes: int, time: int) -> float:
        graph = self.graph_at(time)
        room_bytes = budget_bytes - fixed_bytes(self._step, time)

        def cut_at(price: float) -> Cut:
            return graph.cut(lambda values: price * self._bytes[values])

        over, within = cut_at(0.0), cut_at(graph.highest_price)
        if self._held_bytes(over) <= room_bytes:
            return 0.0
        best = 0.0
        for _ in range(_MOST_CUTS_PER_TIME):
            over_bytes, within_bytes = self._held_bytes(over), self._held_bytes(within)
            if within_bytes > room_bytes or over_bytes <= within_bytes or within.seconds <= over.seconds:
                break
            price = (within.seconds - over.seconds) / (over_bytes - within_bytes)
            middle = cut_at(price)
            best = max(best, middle.bound - price * room_bytes)
            if middle.recomputed in (over.recomputed, within.recomputed):
                break
            if self._held_bytes(middle) > room_bytes:
                over = middle
            else:
                within = middle
        return best

    def _held_bytes(self, cut: Cut) -> float:
        return float(self._bytes[list(cut.held)].sum())


def single_time_lines(step: Step, may_be_recomputed: Set[int], times: Iterable[int]) -> Iterator[Line]:
    """Yield what cuts at one time prove for every budget, at prices from nothing held to all."""
    num_bytes = np.array(step.value_bytes, dtype=np.float64)
    for time in sorted(time for time in set(times) if step.close_time < time < step.num_ops):
        graph = HoldOrReplay(step, time, may_be_recomputed)
        always_bytes = fixed_bytes(step, time)
        corners = [_priced(graph, num_bytes, price) for price in (0.0, graph.highest_price)]
        pending = [(corners[0], corners[1])]
        for _ in range(_MOST_LINES_PER_TIME):
            if not pending:
                break
            # The widest in seconds first.
            pending.sort(key=lambda pair: pair[1].seconds - pair[0].seconds)
            low, high = pending.pop()
            if high.seconds <= low.seconds or low.held_bytes <= high.held_bytes:
                continue
            price = (high.seconds - low.seconds) / (low.held_bytes - high.held_bytes)
            middle = _priced(graph, num_bytes, price)
            yield Line(middle.bound + price * always_bytes, -price)
            if low.held_bytes > middle.held_bytes > high.held_bytes:
                pending += [(low, middle), (middle, high)]


class _Corner(NamedTuple):
    seconds: float
    held_bytes: float
    bound: float


def _priced(graph: HoldOrReplay, num_bytes: npt.NDArray[np.float64], price: float) -> _Corner:
    cut = graph.cut(lambda values: price * num_bytes[values])
    return _Corner(cut.seconds, float(num_bytes[list(cut.held)].sum()), cut.bound)


def least_live_peak(step: Step) -> int:
    """Return the peak of what is live under every plan because the program itself refers to it."""
    change = np.zeros(step.num_ops + 2, dtype=np.int64)
    for storage, start in enumerate(step.storage_start):
        if 0 <= start < NEVER:
            change[start] += step.storage_bytes[storage]
            change[step.natural_end_of_storage[storage] + 1] -= step.storage_bytes[storage]
    live = np.cumsum(change)[: step.num_ops] + step.workspace_bytes
    return step.resident_bytes + max(int(live.max(initial=0)), 0)


def fixed_bytes(step: Step, time: int) -> int:
    """Return what is live while op ``time`` runs under every plan, besides the values in the graph of that time."""
    total = step.resident_bytes + int(step.workspace_bytes[time])
    for storage, start in enumerate(step.storage_start):
        if 0 <= start <= time < NEVER and step.natural_end_of_storage[storage] >= time:
            total += step.storage_bytes[storage]
    # Parts of one storage may be saved apart; held, they are all in the one storage.
    being_read: dict[int, int] = {}
    for index, storage in enumerate(step.value_storage):
        is_natural = step.natural_end_of_storage[storage] >= time
        is_being_read = any(save.read_before <= time <= save.released_after for save in step.saves_of_value[index])
        if is_being_read and not is_natural and step.storage_start[storage] >= 0:
            being_read[storage] = max(step.value_bytes[index], being_read.get(storage, 0))
    return total + sum(being_read.values())
