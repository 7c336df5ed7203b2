"""The planner's twenty original tests, restated; names and numbers are theirs."""

from __future__ import annotations

import pytest

from memfit import (
    AttentionOnly,
    Budget,
    EveryNthLayer,
    FfnOnly,
    Full,
    InvalidParameterError,
    LargestLayers,
    LayerMemoryProfile,
    LayerTypeHint,
    NoCheckpointing,
    Selective,
    activation_stats,
    build_checkpoint_plan,
    estimate_memory_with_plan,
    estimate_total_recompute_flops,
)


def attention(layer_idx: int, size_bytes: int, flops: int) -> LayerMemoryProfile:
    return LayerMemoryProfile(layer_idx, LayerTypeHint.ATTENTION, size_bytes, flops)


def ffn(layer_idx: int, size_bytes: int, flops: int) -> LayerMemoryProfile:
    return LayerMemoryProfile(layer_idx, LayerTypeHint.FFN, size_bytes, flops)


def other(layer_idx: int, size_bytes: int, flops: int) -> LayerMemoryProfile:
    return LayerMemoryProfile(layer_idx, LayerTypeHint.OTHER, size_bytes, flops)


SIX_LAYERS = [
    attention(0, 1024, 2_000_000),
    ffn(1, 512, 1_000_000),
    attention(2, 1024, 2_000_000),
    ffn(3, 512, 1_000_000),
    attention(4, 1024, 2_000_000),
    ffn(5, 512, 1_000_000),
]


def test_none_strategy_saves_all() -> None:
    plan = build_checkpoint_plan(SIX_LAYERS, NoCheckpointing())
    assert plan.checkpointed_layers == ()
    assert len(plan.saved_layers) == 6
    assert plan.total_recompute_flops == 0
    assert plan.total_activation_memory_bytes == 0


def test_full_checkpoints_all() -> None:
    plan = build_checkpoint_plan(SIX_LAYERS, Full())
    assert len(plan.checkpointed_layers) == 6
    assert plan.saved_layers == ()
    assert plan.total_activation_memory_bytes == 1024
    assert plan.total_recompute_flops == 9_000_000


def test_every_nth_layer() -> None:
    plan = build_checkpoint_plan(SIX_LAYERS, EveryNthLayer(2))
    assert plan.checkpointed_layers == (0, 2, 4)
    assert plan.saved_layers == (1, 3, 5)


def test_every_nth_layer_zero_is_error() -> None:
    with pytest.raises(InvalidParameterError, match=r"n of EveryNthLayer must be .* at least 1.* got 0"):
        build_checkpoint_plan(SIX_LAYERS, EveryNthLayer(0))


def test_attention_only_filters() -> None:
    plan = build_checkpoint_plan(SIX_LAYERS, AttentionOnly())
    assert plan.checkpointed_layers == (0, 2, 4)
    assert plan.saved_layers == (1, 3, 5)


def test_ffn_only_filters() -> None:
    plan = build_checkpoint_plan(SIX_LAYERS, FfnOnly())
    assert plan.checkpointed_layers == (1, 3, 5)
    assert plan.saved_layers == (0, 2, 4)


def test_largest_layers_top_k() -> None:
    plan = build_checkpoint_plan(SIX_LAYERS, LargestLayers(2))
    # All three attention layers are equally large; the earlier two go.
    assert plan.checkpointed_layers == (0, 2)
    assert len(plan.saved_layers) == 4


def test_selective_ratio_half() -> None:
    plan = build_checkpoint_plan(SIX_LAYERS, Selective(0.5))
    assert len(plan.checkpointed_layers) == 3
    assert len(plan.saved_layers) == 3


def test_selective_ratio_invalid() -> None:
    with pytest.raises(InvalidParameterError, match=r"from 0 to 1.* got 1\.5"):
        build_checkpoint_plan(SIX_LAYERS, Selective(1.5))


def test_budget_respects_limit() -> None:
    layers = [other(i, 1_048_576, 1_000_000) for i in range(6)]
    plan = build_checkpoint_plan(layers, Budget(3.0))
    saved_bytes = sum(layers[i].activation_size_bytes for i in plan.saved_layers)
    assert saved_bytes <= 3 * 1_048_576
    # The original stopped there and forgot the layer under recompute; the whole must fit.
    assert estimate_memory_with_plan(layers, plan) == 3 * 1_048_576


def test_memory_estimate() -> None:
    plan = build_checkpoint_plan(SIX_LAYERS, NoCheckpointing())
    assert estimate_memory_with_plan(SIX_LAYERS, plan) == 3 * 1024 + 3 * 512


def test_recompute_flops_estimate() -> None:
    plan = build_checkpoint_plan(SIX_LAYERS, Full())
    assert estimate_total_recompute_flops(SIX_LAYERS, plan) == 9_000_000


def test_checkpoint_ratio_calculation() -> None:
    assert build_checkpoint_plan(SIX_LAYERS, Full()).checkpoint_ratio == 1.0
    assert build_checkpoint_plan(SIX_LAYERS, NoCheckpointing()).checkpoint_ratio == 0.0


def test_memory_reduction_ratio() -> None:
    assert build_checkpoint_plan(SIX_LAYERS, Selective(0.5)).estimated_memory_reduction_ratio == 0.5


def test_empty_profile() -> None:
    plan = build_checkpoint_plan([], Full())
    assert plan.checkpointed_layers == ()
    assert plan.saved_layers == ()
    assert plan.total_activation_memory_bytes == 0
    assert plan.total_recompute_flops == 0
    assert plan.checkpoint_ratio == 0.0
    assert build_checkpoint_plan([], NoCheckpointing()).checkpointed_layers == ()


def test_activation_stats_memory_reduction_percent() -> None:
    plan = build_checkpoint_plan(SIX_LAYERS, AttentionOnly())
    stats = activation_stats(SIX_LAYERS, plan)
    assert stats.total_layers == 6
    assert stats.checkpointed_layers == 3
    assert stats.memory_reduction_percent == 50.0


def test_recompute_cost_ratio() -> None:
    assert attention(0, 1024, 2_048_000).recompute_cost_ratio == 2000.0
    assert attention(1, 0, 100).recompute_cost_ratio == 0.0


def test_largest_layers_all() -> None:
    plan = build_checkpoint_plan(SIX_LAYERS, LargestLayers(10))
    assert len(plan.checkpointed_layers) == 6
    assert plan.saved_layers == ()


def test_budget_noop_when_within_limit() -> None:
    layers = [other(i, 1024, 10_000) for i in range(3)]
    plan = build_checkpoint_plan(layers, Budget(100.0))
    assert plan.checkpointed_layers == ()
    assert len(plan.saved_layers) == 3


def test_other_layer_type_attention_only() -> None:
    layers = [other(0, 512, 500_000), attention(1, 1024, 2_000_000), other(2, 512, 500_000)]
    plan = build_checkpoint_plan(layers, AttentionOnly())
    assert plan.checkpointed_layers == (1,)
    assert plan.saved_layers == (0, 2)
