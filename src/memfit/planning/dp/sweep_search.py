"""Sweeps put to use: lower peaks, faster plans within a budget, and proofs of both, as far as the step's size allows.

How much is done follows from the step alone, in counts of rows, states and tries; no clock is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import numpy as np

from memfit.planning.bounds.proofs import Line
from memfit.planning.dp.dynamic_program import Guide, swept
from memfit.planning.dp.state_graph import Numbers, state_graph
from memfit.planning.dp.sweep_timeline import SweepTimeline
from memfit.planning.dp.time_prices import TimePrices
from memfit.planning.simulate.simulator import judged
from memfit.planning.step import Step

# An op with more outputs than this that can be dropped has too many choices.
_MOST_OUTPUTS = 4
# How many ops' worth of rows there are for a small plan, within what limits, and up to how many ops.
_EFFORT_OPS, _LEAST_ROWS, _MOST_ROWS, _MOST_OPS_OF_SMALL = 7_000, 12, 60, 750
# How many ops are in parts of the step, from the first on.
_NUM_OPS_OF_PARTS = (6, 12, 24, 48)
_ROWS_OF_PARTS = 60
# Where there are more values or states, there are no prices.
_MOST_VALUES_PRICED, _MOST_STATES, _MOST_TIMES = 320, 120_000, 64
_TRIES_FOR_PEAK, _TRIES_FOR_BUDGET = 25, 12
# Prices that are too high for the budget as a whole tell more about what is nearly infeasible.
_PRICE_FACTORS = (1.0, 1.7, 3.0)
# Steps this small are swept as a whole.
_MOST_VALUES_OF_ALL, _ROWS_OF_ALL = 40, 600
# What floating point may make of seconds.
_ROUNDING = 1e-9


class Sweeps:
    """What sweeps find out about one step."""

    def __init__(self, step: Step, may_be_recomputed: Set[int]) -> None:
        self._step = step
        self._may_be_recomputed = may_be_recomputed
        self._timeline = SweepTimeline(step, may_be_recomputed)
        ops = self._timeline.ops_to_decide()
        most_outputs = max((len(self._droppable_outputs(op)) for op in ops), default=0)
        self.num_ops = len(ops)
        self.is_possible = 0 < most_outputs <= _MOST_OUTPUTS
        self._prices: TimePrices | None = None
        self._prices_of_budget: dict[int, Numbers] = {}

    def _droppable_outputs(self, op: int) -> list[int]:
        return [value for value in self._step.op_outputs[op] if value in self._timeline.droppable]

    def all_best(self) -> list[frozenset[int]] | None:
        """Return plans among which are the best for every budget, None where that takes too many rows.

        The sweep lets recipes that never run hold nothing; where that made a difference, it proves nothing.
        """
        step = self._step
        if not self._timeline.droppable:
            return []
        if not self.is_possible or len(self._timeline.droppable) > _MOST_VALUES_OF_ALL:
            return None
        if step.time.launches_may_matter:
            return None
        plain = judged(step, frozenset())
        result = swept(self._timeline, plain.peak_bytes, by_seconds=True, most_rows=_ROWS_OF_ALL)
        for plan in result.found:
            simulated = judged(step, step.recomputed_of(plan.dropped))
            if simulated.peak_bytes != plan.peak_bytes or simulated.recompute_seconds != plan.seconds:
                return None
        return [plan.dropped for plan in result.found] if result.is_complete else None

    def smallest(self, limit_bytes: int, num_rows: int, *, is_relaxed: bool) -> tuple[list[frozenset[int]], int, int]:
        """Return plans that may be within a limit, a peak that none can stay below, and how many cells that took.

        The peak is no more than the limit and one.
        """
        result = swept(self._timeline, limit_bytes, by_seconds=False, most_rows=num_rows, is_relaxed=is_relaxed)
        return [plan.dropped for plan in result.found], int(np.ceil(result.least)), result.num_cells

    def small(self, smallest_bytes: int) -> list[frozenset[int]]:
        """Return a plan of low peak, found with few rows."""
        if not self.is_possible or self.num_ops > _MOST_OPS_OF_SMALL:
            return []
        num_rows = min(max(_EFFORT_OPS // self.num_ops, _LEAST_ROWS), _MOST_ROWS)
        result = swept(self._timeline, smallest_bytes - 1, by_seconds=False, most_rows=num_rows)
        return [plan.dropped for plan in result.found]

    def smallest_of_parts(self, smallest: Set[int]) -> tuple[list[frozenset[int]], int]:
        """Return the smallest plan known with its first ops decided anew, and a peak that no plan can stay below."""
        plans: list[frozenset[int]] = []
        least_bytes = 0
        limit_bytes = judged(self._step, smallest).peak_bytes - 1
        for timeline in self._parts():
            result = swept(timeline, limit_bytes, by_seconds=False, most_rows=_ROWS_OF_PARTS)
            plans += [plan.dropped | (smallest - timeline.droppable) for plan in result.found]
            least_bytes = max(least_bytes, int(np.ceil(result.least)))
            if least_bytes > limit_bytes:
                break
        return plans, least_bytes

    def _parts(self) -> Iterable[SweepTimeline]:
        """Return beginnings of the step, whose backward pass comes last: then the gradients of all others are there."""
        ops = self._timeline.ops_to_decide()[::-1] if self.is_possible else []
        for num_ops in _NUM_OPS_OF_PARTS:
            if num_ops < len(ops):
                part = SweepTimeline(self._step, self._may_be_recomputed, before_op=ops[num_ops])
                if part.droppable:
                    yield part

    def find_prices(self, likely_peaks: Set[int]) -> bool:
        """Look at all plans through prices; return whether the step is small enough for that."""
        step = self._step
        if not self.is_possible or len(self._timeline.droppable) > _MOST_VALUES_PRICED:
            return False
        later = range(step.close_time, step.num_ops)
        times = sorted({*likely_peaks, *later[:: max(len(later) // _MOST_TIMES, 1)]})
        self._graph = state_graph(self._timeline, times, _MOST_STATES)
        if self._graph is None:
            return False
        self._prices = TimePrices(step, self._graph)
        self._peak_prices, self.priced_least_peak = self._prices.for_peak(_TRIES_FOR_PEAK)
        return True

    def priced(self, budget_bytes: int) -> tuple[list[frozenset[int]], Line]:
        """Return the plans that were met in looking for prices for a budget, and what those prove."""
        assert self._prices is not None
        self._prices_of_budget[budget_bytes], line = self._prices.for_seconds(budget_bytes, _TRIES_FOR_BUDGET)
        return list(self._prices.take_met()), line

    def has_prices_for(self, budget_bytes: int) -> bool:
        """Return whether prices were looked for at that budget."""
        return budget_bytes in self._prices_of_budget

    def least_seconds(
        self, budget_bytes: int, known_seconds: float, num_rows: int
    ) -> tuple[list[frozenset[int]], float, int]:
        """Return plans that may be within a budget and some seconds, what any takes at least, and the cells it took."""
        result = swept(
            self._timeline,
            budget_bytes,
            by_seconds=True,
            most_rows=num_rows,
            most_seconds=known_seconds,
            is_relaxed=True,
        )
        least = result.least - _ROUNDING * self._step.profile.step_seconds
        return [plan.dropped for plan in result.found], least, result.num_cells

    def faster(self, budget_bytes: int, known_seconds: float, num_rows: int) -> tuple[list[frozenset[int]], float]:
        """Return plans within a budget that take no more than some seconds, and the least that any can take.

        The budget is one for which there are prices.
        """
        prices = self._prices_of_budget[budget_bytes]
        guides = [Guide(factor * prices, 1.0) for factor in _PRICE_FACTORS] + [Guide(self._peak_prices, 0.0)]
        result = swept(
            self._timeline,
            budget_bytes,
            by_seconds=True,
            most_rows=num_rows,
            most_seconds=known_seconds,
            graph=self._graph,
            guides=guides,
        )
        return [plan.dropped for plan in result.found], result.least - _ROUNDING * self._step.profile.step_seconds
