"""What a plan says in bytes and FLOPs, and which plans are refused for which profiles."""

from __future__ import annotations

import pytest
from hypothesis import given
from tests.layers.drawn_layers import layer_lists

from memfit import (
    ActivationStats,
    CheckpointPlan,
    EmptyProfilesError,
    EveryNthLayer,
    Full,
    InvalidParameterError,
    LayerIndexError,
    LayerMemoryProfile,
    LayerTypeHint,
    NoCheckpointing,
    activation_stats,
    build_checkpoint_plan,
    estimate_memory_with_plan,
    estimate_total_recompute_flops,
)
from memfit.layers.strategies import Choice, LayerStrategy

ESTIMATES = [estimate_memory_with_plan, estimate_total_recompute_flops, activation_stats]


def layer(layer_idx: int, size_bytes: int = 10, flops: int = 100) -> LayerMemoryProfile:
    return LayerMemoryProfile(layer_idx, LayerTypeHint.OTHER, size_bytes, flops)


LAYERS = [layer(3, 100, 7), layer(1, 300, 11), layer(2, 50, 13), layer(0, 150, 17)]


def test_a_plan_tells_layers_and_bytes_each_by_its_name() -> None:
    plan = build_checkpoint_plan(LAYERS, EveryNthLayer(2))
    assert plan == CheckpointPlan(
        checkpointed_layers=(3, 2),
        saved_layers=(1, 0),
        total_activation_memory_bytes=100,
        total_recompute_flops=20,
        dropped_activation_bytes=150,
        saved_activation_bytes=450,
        optimality_gap=0.0,
    )
    assert plan.checkpoint_ratio == plan.estimated_memory_reduction_ratio == 0.5
    assert plan.dropped_bytes_ratio == 0.25
    assert plan.peak_reduction_ratio == 50 / 600


def test_stats_tell_layers_and_bytes_each_by_its_name() -> None:
    stats = activation_stats(LAYERS, build_checkpoint_plan(LAYERS, EveryNthLayer(2)))
    assert stats == ActivationStats(
        peak_memory_bytes=550,
        mean_activation_size_bytes=150.0,
        total_layers=4,
        checkpointed_layers=2,
        total_activation_bytes=600,
    )
    assert stats.memory_reduction_percent == 50.0
    assert stats.peak_reduction_percent == 100 * (50 / 600)


def test_an_empty_list_gives_an_empty_plan_and_zeros() -> None:
    plan = build_checkpoint_plan([], Full())
    assert plan == CheckpointPlan((), (), 0, 0)
    assert activation_stats([], plan) == ActivationStats(0, 0.0, 0, 0)
    assert (plan.dropped_bytes_ratio, plan.peak_reduction_ratio) == (0.0, 0.0)
    assert activation_stats([], plan).peak_reduction_percent == 0.0


@given(layer_lists())
def test_all_saved_needs_every_byte_and_all_dropped_the_largest_layer(layers: list[LayerMemoryProfile]) -> None:
    sizes_bytes = [layer.activation_size_bytes for layer in layers]
    nothing, everything = (build_checkpoint_plan(layers, s) for s in (NoCheckpointing(), Full()))
    assert estimate_memory_with_plan(layers, nothing) == sum(sizes_bytes)
    assert estimate_memory_with_plan(layers, everything) == max(sizes_bytes, default=0)
    assert estimate_total_recompute_flops(layers, everything) == sum(layer.recompute_flops for layer in layers)


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_a_plan_for_layers_that_are_not_there_is_an_index_error_that_names_one(estimate: object) -> None:
    plan = build_checkpoint_plan([layer(0), layer(7)], Full())
    with pytest.raises(LayerIndexError, match=r"names layer 7, .*layer_idx from 0 to 1"):
        estimate([layer(0), layer(1)], plan)  # type: ignore[operator]


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_a_plan_with_layers_asked_of_no_profiles_is_an_empty_profiles_error(estimate: object) -> None:
    with pytest.raises(EmptyProfilesError, match="the list of profiles is empty"):
        estimate([], build_checkpoint_plan([layer(0)], Full()))  # type: ignore[operator]


@pytest.mark.parametrize("estimate", ESTIMATES)
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (CheckpointPlan((0,), (), 10, 100), "says nothing about layer 1"),
        (CheckpointPlan((0, 1), (1,), 10, 200), "names layer 1 more than once"),
        (CheckpointPlan((0, 0), (1,), 10, 200), "names layer 0 more than once"),
        (None, r"plan must be a CheckpointPlan.* got None"),
        (CheckpointPlan(None, (), 0, 0), "must be tuples of layer_idx"),  # type: ignore[arg-type]
        (CheckpointPlan(([],), (), 0, 0), "must be tuples of layer_idx"),  # type: ignore[arg-type]
    ],
)
def test_a_plan_that_is_not_one_for_these_layers_is_refused(
    estimate: object, plan: CheckpointPlan, message: str
) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        estimate([layer(0), layer(1)], plan)  # type: ignore[operator]


@pytest.mark.parametrize("positions", [[2], [-1], [0.5], ["a"], None])
def test_a_users_strategy_that_chooses_what_is_not_there_is_refused(positions: list[int]) -> None:
    class Wrong(LayerStrategy):
        def choose(self, profiles: object) -> Choice:
            return Choice(positions)

    with pytest.raises(InvalidParameterError, match=r"Wrong.* position"):
        build_checkpoint_plan([layer(0), layer(1)], Wrong())
