"""A lower bound on the seconds that a budget costs, and on the peak, for plans that replay each op at most once.

Fix a time ``t``, an op after the last of the model's forward pass. Let ``F`` be the ops that a plan replays after
``t``. A value that is still read after ``t`` is, when op ``t`` runs, either live or made by a replay in ``F``: if it is
saved, autograd holds it; if it was restored before, it stays until autograd releases it. The same holds for each value
that a replay in ``F`` starts from, because a replay record holds its inputs until it has run. So what is live at
``t`` beyond ``fixed_bytes(t)`` is at least the values needed after ``t`` that ``F`` does not make, and the plan's
seconds are at least those of ``F``. Any plan that fits a budget therefore is a feasible point of

    minimise seconds(F) subject to held bytes(F) ≤ budget - fixed_bytes(t)

and for every price λ ≥ 0 per byte its seconds are at least ``min over F of seconds(F) + λ · held bytes(F)``, which is a
minimum cut (``min_cut``), less ``λ · (budget - fixed_bytes(t))``. Each price gives a line over all budgets; the prices
are those of the corners of the hull. The bound is the largest of all lines, for several ``t``.

With no seconds at all, the same cut is the least that is held at ``t`` under any plan, which bounds the peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from functools import cache

import numpy as np

from memfit.planning.candidates.min_cut import HoldOrReplay
from memfit.planning.step import Step

_MOST_LINES_PER_TIME = 26
# A price per byte at which the bytes of large steps fit into the units of `min_cut`, as a share of all its units.
_SHARE_OF_UNITS = 0.25


class LowerBound:
    """Lower bounds for the plans of one step. What is found at one time of the step is kept."""

    def __init__(self, step: Step, may_be_recomputed: Set[int]) -> None:
        self._step = step
        self._may_be_recomputed = may_be_recomputed
        self._bytes = np.array(step.value_bytes, dtype=np.float64)
        self._lines_at = cache(self._found_lines_at)

    def seconds(self, budget_bytes: int, times: Iterable[int]) -> float:
        """Return seconds that no plan within the budget can stay below, from what is live at the given op indices."""
        lines = (line for time in sorted(self._usable(times)) for line in self._lines_at(time))
        return max((at_zero + slope * budget_bytes for at_zero, slope in lines), default=0.0)

    def peak_bytes(self, times: Iterable[int]) -> int:
        """Return a peak that no plan can stay below, from what is live at the given op indices."""
        least = int(self._step.natural_bytes.max(initial=self._step.resident_bytes))
        return max([least, *map(self._least_bytes_at, self._usable(times))])

    def _usable(self, times: Iterable[int]) -> set[int]:
        return {time for time in times if self._step.close_time < time < self._step.num_ops}

    def _least_bytes_at(self, time: int) -> int:
        step = self._step
        graph = HoldOrReplay(step, time, self._may_be_recomputed, [0.0] * step.num_ops)
        total_bytes = max(float(self._bytes[graph.values].sum()), 1.0)
        price = graph.highest_price * _SHARE_OF_UNITS / total_bytes
        held_bytes = graph.cut(price * self._bytes).bound / price
        return _fixed_bytes(step, time) + math.floor(held_bytes * (1 - 1e-9))

    def _found_lines_at(self, time: int) -> list[tuple[float, float]]:
        """Return what the cuts at one time prove: lines over all budgets, by their seconds at 0 and their slopes."""
        graph = HoldOrReplay(self._step, time, self._may_be_recomputed)
        always_bytes, cuts = _fixed_bytes(self._step, time), graph.corners(self._bytes, _MOST_LINES_PER_TIME)
        return [(cut.bound + price * always_bytes, -price) for price, cut in cuts]


def _fixed_bytes(step: Step, time: int) -> int:
    """Return what is live while op ``time`` runs under every plan, besides the values in the graph of that time."""
    # Parts of one storage may be saved apart; held, they are all in the one storage.
    being_read: dict[int, int] = {}
    for value, storage in enumerate(step.value_storage):
        is_read = any(save.read_before <= time <= save.released_after for save in step.saves_of_value[value])
        if is_read and step.natural_end_of_storage[storage] < time and step.storage_start[storage] >= 0:
            being_read[storage] = max(step.value_bytes[value], being_read.get(storage, 0))
    return int(step.natural_bytes[time]) + sum(being_read.values())
