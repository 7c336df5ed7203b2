"""The covering search and its bounds against all subsets, also when its work is cut short."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain, combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.layers.cover import cheapest_cover, exact_dtype, find_break

Items = list[tuple[int, int]]
numbers = st.sampled_from([4, 50, 10**18]).flatmap(lambda largest: st.integers(0, largest))


@st.composite
def items_and_demands(draw: st.DrawFn) -> tuple[Items, int]:
    """Return items of (weight, cost) by ascending cost per weight, and a demand that all together reach."""
    items = draw(st.lists(st.tuples(numbers.map(lambda weight: weight + 1), numbers), min_size=1, max_size=9))
    demand = draw(st.integers(1, sum(weight for weight, _ in items)))
    return sorted(items, key=lambda item: Fraction(item[1], item[0])), demand


def covers(items: Items, demand: int) -> list[tuple[int, int, int]]:
    """Return (cost, -weight, number of items) of every subset that reaches the demand, the best first."""
    subsets = chain.from_iterable(combinations(items, count) for count in range(len(items) + 1))
    totals = [(sum(c for _, c in chosen), -sum(w for w, _ in chosen), len(chosen)) for chosen in subsets]
    return sorted(total for total in totals if -total[1] >= demand)


def arrays(items: Items) -> tuple[np.ndarray, np.ndarray]:
    dtype = exact_dtype(max(sum(weight for weight, _ in items), sum(cost for _, cost in items)))
    return np.array([weight for weight, _ in items], dtype), np.array([cost for _, cost in items], dtype)


@settings(max_examples=300, deadline=None)
@given(items_and_demands())
def test_the_cover_is_the_cheapest_and_of_these_the_heaviest(drawn: tuple[Items, int]) -> None:
    items, demand = drawn
    weights, costs = arrays(items)
    everything = sum(cost for _, cost in items)
    search = cheapest_cover(weights, costs, demand, known_cost=everything + 1, known_weight=0, work_limit=10**9)
    best_cost, best_weight, _ = covers(items, demand)[0]
    assert search.best is not None
    assert (search.best.cost, -search.best.weight) == (best_cost, best_weight)
    assert search.lower_bound == best_cost
    assert sum(items[i][0] for i in search.best.positions) == search.best.weight
    assert sum(items[i][1] for i in search.best.positions) == search.best.cost


@settings(max_examples=200, deadline=None)
@given(items_and_demands(), st.integers(0, 4000))
def test_a_search_cut_short_still_proves_a_bound(drawn: tuple[Items, int], work_limit: int) -> None:
    items, demand = drawn
    weights, costs = arrays(items)
    known_cost = sum(cost for _, cost in items) + 1
    search = cheapest_cover(weights, costs, demand, known_cost, known_weight=0, work_limit=work_limit)
    assert search.lower_bound <= covers(items, demand)[0][0]
    if search.best is not None:
        assert covers(items, demand)[0][0] <= search.best.cost < known_cost
        assert search.best.weight >= demand


@given(items_and_demands())
def test_nothing_is_found_that_is_not_better_than_what_is_known(drawn: tuple[Items, int]) -> None:
    items, demand = drawn
    weights, costs = arrays(items)
    best_cost, best_weight, _ = covers(items, demand)[0]
    search = cheapest_cover(weights, costs, demand, best_cost, -best_weight, work_limit=10**9)
    assert search.best is None
    assert search.lower_bound == best_cost


@given(items_and_demands())
def test_the_break_is_where_the_demand_is_reached_and_bounds_every_cover(drawn: tuple[Items, int]) -> None:
    items, demand = drawn
    start = find_break(*arrays(items), demand)
    assert start is not None
    before = items[: start.position]
    assert start.weight_before == sum(weight for weight, _ in before) < demand
    assert start.weight_before + items[start.position][0] >= demand
    assert start.cost_before == sum(cost for _, cost in before)
    assert start.cost_before <= start.lower_bound <= covers(items, demand)[0][0]
    assert find_break(*arrays(items), sum(weight for weight, _ in items) + 1) is None
