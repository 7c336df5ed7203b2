"""Budgets on steps of real size: gaps, monotony, what others would do, the smallest budget, and extremes."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from tests.planning.drawn_profiles import drawn_profiles
from tests.planning.model_families import FAMILIES, chain, gpt
from tests.planning.step_builder import StepBuilder

from memfit.errors import InfeasibleBudgetError, InvalidParameterError
from memfit.graph.model_profile import ModelProfile, RecordedOp, RecordedValue, Replay, Save
from memfit.graph.plan import Decision, FrontierPoint, Plan
from memfit.layers.strategies import (
    EveryNthLayer,
    Full,
    LargestLayers,
    LayerStrategy,
    NoCheckpointing,
    Selective,
    SqrtLayers,
)
from memfit.planning.planner import frontier, plan
from memfit.planning.search import explored
from memfit.planning.simulate.simulator import judged, simulate
from memfit.planning.step import Step
from memfit.units import format_bytes

GIB = 2**30


@cache
def profile_of(family: str) -> ModelProfile:
    return FAMILIES[family]()


@cache
def points_of(family: str) -> tuple[FrontierPoint, ...]:
    return frontier(profile_of(family), points=10)


@pytest.mark.parametrize("family", FAMILIES)
def test_gaps_at_eight_budgets_are_small(family: str) -> None:
    between = points_of(family)[1:-1]
    assert len(between) == 8
    # The bound looks at one time of the step at a time; in a U-Net the peaks of low budgets have several.
    assert max(point.plan.optimality_gap for point in between) <= (0.04 if family == "unet" else 0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_frontier_is_fastest_first_and_each_point_is_smaller_and_slower(family: str) -> None:
    points = points_of(family)
    assert points[0].overhead == 0
    for faster, smaller in pairwise(points):
        assert faster.peak_bytes > smaller.peak_bytes
        assert faster.overhead < smaller.overhead
    assert points[-1].peak_bytes < 0.6 * points[0].peak_bytes


@settings(max_examples=6, deadline=None)
@given(drawn_profiles(max_forward_ops=18, max_backward_ops=12))
def test_a_smaller_budget_is_never_planned_faster_or_larger(profile: ModelProfile) -> None:
    peaks = [candidate.peak_bytes for candidate in explored(Step(profile)).frontier]
    plans = [plan(profile, budget=budget) for budget in sorted({*peaks, *(peak + 1 for peak in peaks)})[:8]]
    for tight, loose in pairwise(plans):
        assert tight.predicted_overhead >= loose.predicted_overhead
        assert tight.predicted_peak_bytes <= loose.predicted_peak_bytes
    for made in plans:
        assert made.budget_bytes is not None
        assert made.predicted_peak_bytes <= made.budget_bytes


@pytest.mark.parametrize(
    "strategy",
    [Full(), NoCheckpointing(), SqrtLayers(), EveryNthLayer(2), Selective(0.37), LargestLayers(3)],
    ids=repr,
)
def test_no_strategy_is_faster_at_the_memory_it_reaches(strategy: LayerStrategy) -> None:
    profile = gpt(6)
    theirs = plan(profile, strategy=strategy)
    ours = plan(profile, budget=theirs.predicted_peak_bytes)
    assert ours.predicted_overhead <= theirs.predicted_overhead
    assert ours.predicted_peak_bytes <= theirs.predicted_peak_bytes


def test_an_infeasible_budget_names_the_smallest_and_what_holds_it_and_that_one_works() -> None:
    profile = gpt(4)
    with pytest.raises(InfeasibleBudgetError, match="at least budget=") as raised:
        plan(profile, budget="5GiB")
    minimum_bytes = raised.value.minimum_bytes
    # The logits in fp32, their gradients and the log-probabilities: the loss holds the peak whatever is recomputed.
    message = str(raised.value)
    assert message.startswith(f"the smallest budget found for this step is {format_bytes(minimum_bytes)} (")
    assert "gradients and other results of the backward pass 3.91 GiB" in message
    assert "with the logits, 1000.0 MiB, which lm_head makes" in message
    assert "computing the loss in chunks (chunk_loss=True), a smaller batch or model" in message
    made = plan(profile, budget=minimum_bytes)
    assert made.predicted_peak_bytes == minimum_bytes
    with pytest.raises(InfeasibleBudgetError):
        plan(profile, budget=minimum_bytes - 1)


def test_an_infeasible_budget_names_the_root_module_too() -> None:
    profile = one_op(saves=(Save(1, 0),))
    with pytest.raises(InfeasibleBudgetError) as raised:
        plan(profile, budget=100)
    assert "it is reached at aten.tanh in the model itself" in str(raised.value)
    assert "activations of the model itself 100 B" in str(raised.value)


def test_a_chain_of_layers_fits_into_a_tenth_of_its_memory() -> None:
    profile = chain(400)
    points = frontier(profile, points=8)
    assert points[0].peak_bytes > 400 * 2**20
    # √(2·400) = 28 layers are the least that held and replayed ones together can be.
    assert 28 * 2**20 <= points[-1].peak_bytes <= 40 * 2**20
    assert points[-1].overhead <= 1 / 3


def test_no_even_spacing_of_a_long_chain_is_smaller() -> None:
    builder = StepBuilder()
    x = builder.batch(8_192)
    for number in range(500):
        path, weight = builder.block(f"layers.{number}"), builder.parameter(f"layers.{number}.weight", 256)
        (x,) = builder.op(path, "addmm", [x, weight], 8_192, saves=[x, weight])
        (x,) = builder.op(path, "tanh", [x], 8_192, saves_outputs=[0])
    builder.op(None, "sum", [x], 512)
    step = Step(builder.finish("chain"))
    smallest = explored(step).frontier[-1]
    ends = [index for index in step.plannable if step.profile.ops[step.value_op[index]].op == "aten.tanh"]
    for distance in (20, 25, 30, 35, 40, 45, 50, 60):
        wanted = set(step.plannable) - set(ends[::-distance])
        assert smallest.peak_bytes <= judged(step, step.recomputed_of(wanted)).peak_bytes


def one_op(*, saves: tuple[Save, ...] = (), seconds: float = 1.0) -> ModelProfile:
    op = RecordedOp("", "aten.tanh", 0, (0,), (1,), (), 5, Replay.YES, seconds=seconds)
    outside = RecordedValue("x", 100, None, 0)
    made = RecordedValue("::aten.tanh#0", 100, 0, 1, dies_after=0, saves=saves)
    return ModelProfile((op,), (outside, made), (), 200, 3.0, "cpu", "one-op")


def test_a_step_of_one_op_that_saves_nothing_has_one_plan() -> None:
    made = plan(one_op(), budget=200)
    assert made == Plan({"::aten.tanh#0": Decision.SAVE}, (), (), 0, "one-op", 200, 0.0, 0.0, 200)
    assert [point.peak_bytes for point in frontier(one_op())] == [200]


def test_zero_seconds_ops_are_recomputed_for_nothing() -> None:
    profile = gpt(2)
    free = replace(profile, ops=tuple(replace(op, seconds=0.0) for op in profile.ops))
    assert set(plan(free, budget="1TiB").decisions.values()) == {Decision.SAVE}
    points = frontier(free)
    assert len(points) == 1
    assert points[0].overhead == 0
    assert points[0].peak_bytes <= frontier(profile)[-1].peak_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_far_above_the_peak_changes_nothing(family: str) -> None:
    made = plan(profile_of(family), budget="1TiB")
    assert set(made.decisions.values()) == {Decision.SAVE}
    assert made.recorded_modules == ()
    assert (made.predicted_overhead, made.recompute_flops, made.optimality_gap) == (0, 0, 0)


def test_forced_values_are_honoured_under_budgets() -> None:
    profile = gpt(4)
    budget = points_of_gpt4()[-1].peak_bytes * 5 // 4
    made = plan(profile, budget=budget, force_save=["*::aten.gelu"], force_recompute=["*.norm1"])
    for name, decision in made.decisions.items():
        if name.endswith("gelu#0"):
            assert decision is Decision.SAVE
        if ".norm1::aten.native_layer_norm#0" in name and not re.search(r"#0\.\d", name):
            assert decision is Decision.RECOMPUTE
    assert made.predicted_peak_bytes <= budget
    with pytest.raises(InvalidParameterError, match="nearest"):
        plan(profile, budget=budget, force_save=["blocks.*::aten.gelo"])


@cache
def points_of_gpt4() -> tuple[FrontierPoint, ...]:
    return frontier(gpt(4))


def test_budgets_may_be_bytes_texts_shares_and_auto() -> None:
    profile = replace(one_op(), device_bytes=400, free_bytes=300)
    assert plan(profile, budget=200).budget_bytes == 200
    assert plan(profile, budget="1 KiB").budget_bytes == 1024
    assert plan(profile, budget=0.5).budget_bytes == 200
    assert plan(profile, budget="auto").budget_bytes == 285


@pytest.mark.parametrize("number", [np.int32(200), np.int64(200), np.uint64(200), np.float32(0.5), np.float16(0.5)])
def test_numbers_of_numpy_are_budgets_as_pythons_are(number: float) -> None:
    found = plan(replace(one_op(), device_bytes=400), budget=number).budget_bytes
    assert (type(found), found) == (int, 200)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "exactly one of budget"),
        ({"budget": 200, "strategy": Full()}, "exactly one of budget"),
        ({"budget": 1.5}, "share of the device's memory"),
        ({"budget": -1}, "negative"),
        ({"budget": True}, "got True"),
        ({"budget": np.True_}, r"got np\.True_"),
        ({"budget": np.float32(1.5)}, "share of the device's memory"),
        ({"budget": np.int64(-1)}, "negative"),
        ({"budget": np.array([200])}, r"got array\(\[200\]\)"),
        ({"budget": [200]}, r"got \[200\] \(list\)"),
        ({"budget": 200j}, "got 200j"),
        ({"budget": "many"}, "not a size"),
        ({"budget": 0.5}, "does not have"),
        ({"budget": "auto"}, "does not have"),
    ],
)
def test_a_wrong_budget_is_told_with_what_is_allowed(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidParameterError, match=told):
        plan(one_op(), **arguments)  # type: ignore[arg-type]


def test_storages_whose_parts_are_written_and_saved_apart_are_kept() -> None:
    save = Save(2, 2)
    ops = (
        RecordedOp("", "aten.addmm", 0, (0,), (1,), (), 1, Replay.YES),
        RecordedOp("", "aten.sigmoid_", 0, (1,), (2,), (1,), 1, Replay.YES),
        RecordedOp("", "aten.tanh_", 0, (2,), (3,), (2,), 1, Replay.YES),
    )
    values = (
        RecordedValue("x", 8, None, 0),
        RecordedValue("::aten.addmm#0", 8, 0, 1, dies_after=2),
        RecordedValue("::aten.sigmoid_#0", 8, 1, 1, dies_after=2, saves=(save,)),
        RecordedValue("::aten.tanh_#0", 8, 2, 1, dies_after=2, saves=(save,)),
    )
    profile = ModelProfile(ops, values, (), 16, 1.0, "cpu", "gates")
    assert simulate(profile, {1, 2, 3}).replayed_ops == ()
    assert set(plan(profile, budget=16).decisions.values()) == {Decision.SAVE}
