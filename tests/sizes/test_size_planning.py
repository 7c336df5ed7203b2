"""Which sizes have plans of their own, with overheads that are known in advance."""

from __future__ import annotations

from itertools import product

import pytest

from memfit.errors import MemfitError
from memfit.graph.inputs import Input
from memfit.graph.plan import Plan
from memfit.graph.size_plans import SizedPlan, SizePlans
from memfit.sizes.size_planning import plans_for_sizes

Sizes = tuple[int, ...]


def sized_plan(sizes: Sizes, overhead: float) -> SizedPlan:
    plan = Plan({}, (), (), 0, "model", predicted_overhead=overhead, inputs=(Input("x", "float32", sizes),))
    return SizedPlan(sizes, plan, 1.0)


def linear_overhead(sizes: Sizes) -> float:
    """Return what a step of these sizes takes beyond what fits: nothing up to half of 100, or of 100 x 100."""
    elements = 1.0
    for size in sizes:
        elements *= size / 100
    return 0.2 * max(0.0, elements - 0.5)


def planned(largest: Sizes, least: Sizes, multiples: Sizes, refused: set[Sizes] | None = None) -> SizePlans:
    def plan_at(sizes: Sizes) -> SizedPlan:
        if refused is not None and sizes not in refused:
            refused.add(sizes)
            raise MemfitError("the model does not take this size")
        return sized_plan(sizes, linear_overhead(sizes))

    return plans_for_sizes(
        plan_at,
        lambda plan, sizes: plan.predicted_overhead,
        least,
        sized_plan(largest, linear_overhead(largest)),
        multiples,
    )


def overhead_used(plans: SizePlans, sizes: Sizes) -> float:
    places = plans.places_for((Input("x", "float32", sizes),))
    return plans.entries[places[0]].plan.predicted_overhead


def test_no_size_is_more_than_a_point_slower_than_by_a_plan_of_its_own() -> None:
    plans = planned((100,), (10,), (1,))
    assert max(overhead_used(plans, (size,)) - linear_overhead((size,)) for size in range(1, 101)) <= 0.01
    assert len(plans.entries) <= 32


def test_plans_that_cost_small_steps_more_are_made_closer_together() -> None:
    """A plan that costs 0.5 % where it is made for costs half as large a step 1 %, and a tenth of it 5 %."""

    def plan_at(sizes: Sizes) -> SizedPlan:
        return sized_plan(sizes, 0.005 if sizes[0] > 20 else 0.0)

    def overhead_at(plan: Plan, sizes: Sizes) -> float:
        return plan.predicted_overhead * plan.inputs[0].shape[0] / sizes[0]

    plans = plans_for_sizes(plan_at, overhead_at, (1,), plan_at((100,)), (1,))
    for size in range(1, 101):
        place = plans.places_for((Input("x", "float32", (size,)),))[0]
        used = overhead_at(plans.entries[place].plan, (size,))
        assert used - plan_at((size,)).plan.predicted_overhead <= 0.01
    assert len(plans.entries) < 10


def test_planned_sizes_are_multiples_of_what_the_batches_are_multiples_of_where_there_are_any() -> None:
    plans = planned((64,), (16,), (16,))
    assert sorted(entry.sizes[0] for entry in plans.entries) == [16, 32, 48, 52, 56, 60, 64]


def test_two_sizes_share_a_bounded_number_of_plans() -> None:
    plans = planned((100, 100), (10, 10), (1, 1))
    assert len(plans.entries) == 32
    losses = [
        overhead_used(plans, sizes) - linear_overhead(sizes) for sizes in product(range(5, 101, 5), range(5, 101, 5))
    ]
    assert min(losses) >= 0
    # The step that is the largest in one size and the smallest in the other runs plain.
    assert overhead_used(plans, (100, 10)) == overhead_used(plans, (10, 100)) == 0.0
    assert sum(losses) / len(losses) <= 0.01
    assert max(losses) <= 0.03


def test_sizes_that_cannot_be_planned_for_run_by_the_next_larger_plan() -> None:
    plans = planned((100,), (10,), (1,), refused=set())
    assert [entry.sizes for entry in plans.entries] == [(100,)]
    assert overhead_used(plans, (1,)) == pytest.approx(0.1)


def test_a_plan_that_is_replaced_keeps_its_size() -> None:
    plans = SizePlans([sized_plan((10,), 0.0), sized_plan((20,), 0.1)], largest := sized_plan((30,), 0.2))
    plans.add(largest)
    smaller = sized_plan((30,), 0.3).plan
    plans.replace_plan(2, smaller)
    assert plans.largest.plan == smaller
    assert plans.places_for((Input("x", "float32", (15,)),)) == (1, 2)
    assert plans.places_for((Input("x", "float32", (31,)),)) == ()
