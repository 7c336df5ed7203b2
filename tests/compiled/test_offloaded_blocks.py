"""Compiled blocks that offload what they save: on the CPU, where copies are done at once and count no memory."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from tests.compiled.test_compiled_steps import Case, gradients, measured, same
from tests.loop_peaks import peaks_of_steps

import memfit
from memfit.graph.model_profile import Link

FAST = Link(1e15, 1e15, 0.0, 2**40)
SLOW = Link(1.0, 1.0, 0.0, 2**40)


@pytest.fixture(scope="module")
def case() -> Case:
    found = measured("gpt")
    return found._replace(profile=replace(found.profile, device="cuda", link=FAST))


def offloading_plan(case: Case, share: float = 0.0) -> memfit.Plan:
    """Return the plan for a budget between the smallest peak with offloading (0) and that of the fastest plan (1)."""
    points = memfit.frontier(case.profile, points=2, host_budget="1GiB")
    low, high = points[-1].peak_bytes, points[0].peak_bytes
    return memfit.plan(case.profile, budget=low + round(share * (high - low)), host_budget="1GiB")


def test_offloading_goes_below_the_smallest_peak_of_partitions_alone(case: Case) -> None:
    with pytest.raises(memfit.InfeasibleBudgetError) as caught:
        memfit.plan(case.profile, budget=1)
    plan = offloading_plan(case)
    assert plan.compiled is not None
    assert plan.compiled.offloaded
    assert plan.host_bytes > 0
    assert plan.predicted_peak_bytes < caught.value.minimum_bytes


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_gradients_are_the_same_and_peaks_within_the_budget(case: Case, share: float) -> None:
    plan = offloading_plan(case, share)
    assert plan.compiled is not None
    assert plan.compiled.offloaded
    with memfit.apply(case.model, replace(plan, compiled=replace(plan.compiled, offloaded={}))):
        expected = gradients(case.model, case.batch)
        held_peaks = peaks_of_steps(case.model, case.batch, lambda loss: loss)
    with memfit.apply(case.model, plan):
        assert same(expected, gradients(case.model, case.batch))
        peaks = peaks_of_steps(case.model, case.batch, lambda loss: loss)
    assert plan.budget_bytes is not None
    assert max(peaks) <= plan.budget_bytes
    assert max(peaks) == pytest.approx(plan.predicted_peak_bytes, rel=0.05)
    assert max(peaks) < max(held_peaks)


def test_what_was_saved_can_be_read_twice_and_is_given_up_with_the_graph(case: Case) -> None:
    plan = offloading_plan(case)
    model = case.model
    with memfit.apply(model, plan):
        expected = gradients(model, case.batch)[:-1]
        model.zero_grad()
        torch.manual_seed(5)
        # Two passes before the first backward pass, as in accumulation.
        losses = [model(case.batch), model(case.batch)]
        losses[0].backward()
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        assert same(expected, found)
        losses[1].backward()
        del losses
        gc.collect()
        assert len(set(peaks_of_steps(model, case.batch, lambda loss: loss))) == 1
    model.zero_grad()


def test_a_slow_link_is_not_used(case: Case) -> None:
    slow = replace(case.profile, link=SLOW)
    alone = memfit.frontier(slow, points=6)
    with_host = memfit.frontier(slow, points=6, host_budget="1GiB")
    fastest = memfit.plan(slow, budget=alone[2].peak_bytes, host_budget="1GiB")
    assert fastest.compiled is not None
    assert not fastest.compiled.offloaded
    # Where nothing else keeps the budget, it is used all the same.
    assert with_host[-1].peak_bytes < alone[-1].peak_bytes


def test_plans_with_offloading_survive_their_file(case: Case, tmp_path) -> None:
    plan = offloading_plan(case)
    plan.save(tmp_path / "plan.json")
    again = memfit.Plan.load(tmp_path / "plan.json")
    assert again.compiled == plan.compiled
    assert again.host_bytes == plan.host_bytes


def test_no_more_of_the_hosts_memory_is_planned_for_than_was_given(case: Case) -> None:
    most = offloading_plan(case).host_bytes
    points = memfit.frontier(case.profile, points=5, host_budget=most // 2)
    assert all(point.plan.host_bytes <= most // 2 for point in points)
