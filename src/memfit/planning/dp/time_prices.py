"""What a byte is worth at each time of the step: prices at which the cheapest plan proves most.

For any prices, the cheapest plan of a `StateGraph` costs no more than any other, and a plan within a budget pays for no
more than the budget at each time. So the seconds of every plan within the budget are at least the cheapest cost less
the prices times the budget: a line over all budgets. Prices that make this largest at one budget are the duals of a
small linear program that mixes the plans known so far, with memory within the budget at each time on average
(Dantzig and Wolfe, 1960); at those prices the cheapest plan either joins the mix, or there is no better bound. Looking
half way between the last prices and the best so far keeps them from jumping about.

The same with the peak in place of the seconds, and prices that sum to 1, bounds the least peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy.optimize import linprog

from memfit.planning.bounds.proofs import Line
from memfit.planning.dp.state_graph import CheapestPlan, Numbers, StateGraph
from memfit.planning.simulate.simulator import ops_memory_bytes
from memfit.planning.step import Step

# What floating point may add to sums of this many terms, as a share of all of them.
_ROUNDING = 1e-9
# Bounds this near to the best that can be are good enough: shares of the step, and of the plain peak.
_NEAR_ENOUGH = 1e-4
# What a mix pays for each share of the plain peak by which it is over the budget, in steps.
_PENALTY = 1e3


class TimePrices:
    """Prices for one step, and the plans that were met in looking for them."""

    def __init__(self, step: Step, graph: StateGraph) -> None:
        self._step = step
        self._graph = graph
        self._step_seconds = step.profile.step_seconds or 1.0
        plain = ops_memory_bytes(step, frozenset())[graph.times].astype(np.float64)
        self._unit_bytes = max(float(plain.max(initial=1.0)), 1.0)
        self._mix: list[tuple[float, Numbers]] = [(0.0, plain)]
        self.met: list[frozenset[int]] = []

    def for_seconds(self, budget_bytes: int, most_tries: int) -> tuple[Numbers, Line]:
        """Return prices that prove nearly the most for one budget, in seconds per byte, and what they prove for all."""
        budget_units = budget_bytes / self._unit_bytes
        best, best_prices = -math.inf, np.zeros(len(self._graph.times))
        for _ in range(most_tries):
            costs = np.array([seconds for seconds, _ in self._mix] + [_PENALTY * self._step_seconds])
            mixed_seconds, prices = self._mixed(costs / self._step_seconds, budget_units)
            prices = prices if best == -math.inf else (prices + best_prices) / 2
            plan = self._cheapest(prices * self._step_seconds / self._unit_bytes, 1.0)
            bound = plan.cost / self._step_seconds - float(prices.sum()) * budget_units
            if bound > best:
                best, best_prices = bound, prices
            if mixed_seconds - best < _NEAR_ENOUGH:
                break
        prices = best_prices * self._step_seconds / self._unit_bytes
        at_zero = best * self._step_seconds + float(prices.sum()) * budget_bytes
        lost = _ROUNDING * (abs(at_zero) + self._step_seconds)
        return prices, Line(at_zero - lost, -float(prices.sum()))

    def for_peak(self, most_tries: int) -> tuple[Numbers, int]:
        """Return prices that sum to 1 and prove nearly the most about the least peak, and that peak."""
        best, best_prices = -math.inf, np.zeros(len(self._graph.times))
        for _ in range(most_tries):
            costs = np.append(np.zeros(len(self._mix)), 1.0)
            mixed_peak, prices = self._mixed(costs, 0.0)
            prices = prices / max(float(prices.sum()), 1e-12)
            prices = prices if best == -math.inf else (prices + best_prices) / 2
            bound = self._cheapest(prices, 0.0).cost / self._unit_bytes
            if bound > best:
                best, best_prices = bound, prices
            if mixed_peak - best < _NEAR_ENOUGH:
                break
        return best_prices, math.ceil(best * self._unit_bytes * (1 - _ROUNDING))

    def _mixed(self, costs: Numbers, budget_units: float) -> tuple[float, Numbers]:
        """Return the cost of the best mix, and the prices it pays. The last variable is by how much it is over."""
        memory = np.array([memory for _, memory in self._mix]).T / self._unit_bytes
        num_times, num_plans = memory.shape
        solved = linprog(
            costs,
            A_ub=np.hstack([memory, -np.ones((num_times, 1))]),
            b_ub=np.full(num_times, budget_units),
            A_eq=np.append(np.ones(num_plans), 0.0)[None],
            b_eq=[1.0],
            method="highs",
        )
        return float(solved.fun), np.maximum(-solved.ineqlin.marginals, 0.0)

    def _cheapest(self, prices: Numbers, seconds_weight: float) -> CheapestPlan:
        plan = self._graph.cheapest(prices, seconds_weight)
        self._mix.append((plan.seconds, plan.memory_bytes))
        self.met.append(plan.dropped)
        return plan

    def take_met(self) -> Iterator[frozenset[int]]:
        """Yield the plans that were met since the last time."""
        while self.met:
            yield self.met.pop(0)
