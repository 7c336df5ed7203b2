"""A second lower bound on covers, from how many items one must have. It closes the gap where costs follow sizes.

Where a cost is a size plus a constant, what the linear relaxation misses is the constant of the item it cuts in two.
But a cover has at least as many items as the heaviest ones that reach the demand, and a cover without a needless item
has at most one more than the lightest ones that stay short of it. So each cost can be shifted by a price per item, and
the price be paid once for the least number of items (or, where it is negative, for the most): for any price, that
bounds every cover from below. ``best_price`` looks for a good one; the bound itself is in exact integers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memfit.layers.cover import Numbers, exact_dtype

# A golden-section search shrinks its interval by a third a step: enough for about twelve digits.
_NUM_SEARCH_STEPS = 60


def count_limits(ascending_weights: Numbers, demand: int) -> tuple[int, int]:
    """Return the least number of items in any cover, and the most in a cover from which no item can be left out."""
    cumulative = np.cumsum(ascending_weights)
    num_items = len(ascending_weights)
    least = num_items - int(np.searchsorted(cumulative, int(cumulative[-1]) - demand, side="right"))
    most = min(num_items, 1 + int(np.searchsorted(cumulative, demand)))
    return least, most


def priced_bound(weights: Numbers, shifted_costs: Numbers, demand: int, price: int, limits: tuple[int, int]) -> int:
    """Return what no cover can cost less than.

    ``shifted_costs`` are the costs less ``price``, and the items are in ascending order of shifted cost per weight.
    Items of weight and shifted cost 0 are items taken out.
    """
    cumulative = np.cumsum(weights)
    position = int(np.searchsorted(cumulative, demand))
    cost_of_gifts = int(np.minimum(shifted_costs, 0).sum())
    least, most = limits
    cost_of_count = price * (least if price > 0 else most)
    if position == len(weights) or int(shifted_costs[position]) <= 0:
        # Whoever costs less than nothing is taken anyway, and together they reach the demand.
        return cost_of_count + cost_of_gifts
    weight_before = int(cumulative[position - 1]) if position else 0
    missing_cost = -((weight_before - demand) * int(shifted_costs[position]) // int(weights[position]))
    return cost_of_count + int(shifted_costs[:position].sum()) + missing_cost


def best_price(weights: Numbers, costs: Numbers, demand: int) -> int:
    """Return a price per item, of either sign, for which the bound is high; ``weights`` must be positive."""
    limits = count_limits(np.sort(weights), demand)
    largest_cost = int(costs.max())
    costs = costs.astype(exact_dtype(2 * largest_cost * len(costs)))

    def bound_at(price: float) -> int:
        whole = int(price)
        shifted = costs - whole
        order = np.argsort(shifted.astype(np.float64) / weights.astype(np.float64), kind="stable")
        return priced_bound(weights[order], shifted[order], demand, whole, limits)

    return int(_highest(bound_at, -float(largest_cost), float(largest_cost)))


def _highest(function: Callable[[float], int], low: float, high: float) -> float:
    """Return about where a concave function is highest, by golden-section search."""
    golden = (5**0.5 - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(_NUM_SEARCH_STEPS):
        if at_left < at_right:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = function(right)
        else:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = function(left)
    return left if at_left >= at_right else right
