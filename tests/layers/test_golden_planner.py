"""The planner against replies recorded from the original: 300 rows, and each row left out is counted by its reason."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memfit import (
    AttentionOnly,
    Budget,
    EveryNthLayer,
    FfnOnly,
    Full,
    InfeasibleBudgetError,
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
from memfit.layers.strategies import LayerStrategy

GOLDEN = Path(__file__).parents[1] / "data" / "seeds" / "seed2.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in GOLDEN.read_text().splitlines()]

# The original computes ratios and means in 32-bit floats: 24 bits of mantissa, a few roundings.
F32_RELATIVE_ERROR = 1e-6


def profiles_of(request: dict[str, Any]) -> list[LayerMemoryProfile]:
    return [
        LayerMemoryProfile(layer_idx, LayerTypeHint[kind.upper()], size_bytes, flops)
        for layer_idx, kind, size_bytes, flops in request["profiles"]
    ]


def strategy_of(request: dict[str, Any]) -> LayerStrategy:
    match request["strategy"]:
        case "none":
            return NoCheckpointing()
        case "full":
            return Full()
        case "attention_only":
            return AttentionOnly()
        case "ffn_only":
            return FfnOnly()
        case "selective":
            return Selective(request["checkpoint_ratio"])
        case "every_nth":
            return EveryNthLayer(request["n"])
        case "largest":
            return LargestLayers(request["top_k"])
        case "budget":
            return Budget(request["max_memory_mb"])
    raise AssertionError(f"a strategy this test does not know: {request['strategy']}")


def defect_of(row: dict[str, Any]) -> str | None:
    """Return the original's defect that the row shows, or None where memfit must reply the same."""
    request, reply = row["request"], row["reply"]
    indices = [profile[0] for profile in request["profiles"]]
    if len(set(indices)) < len(indices):
        return "a layer_idx given twice is counted in both lists"
    if not reply["ok"]:
        return None
    if request["strategy"] == "budget" and math.isnan(request["max_memory_mb"]):
        return "a budget of NaN is taken for zero"
    if request["strategy"] == "budget" and reply["checkpointed_layers"]:
        return "the budget is broken by the working set of the recompute"
    if request["strategy"] == "selective":
        ratio, num_layers = request["checkpoint_ratio"], len(indices)
        num_wanted = int(Fraction(ratio) * num_layers + Fraction(1, 2))
        if len(reply["checkpointed_layers"]) != num_wanted:
            return "selective misses its count"
        positions = [indices.index(layer_idx) for layer_idx in reply["checkpointed_layers"]]
        # The last distance is the one to the end; in an even spread they differ by one at most.
        distances = [after - before for before, after in pairwise([*positions, num_layers])]
        if distances and max(distances) - min(distances) > 1:
            return "selective is front-loaded"
    return None


def test_every_recorded_row_is_either_compared_or_left_out_by_a_named_defect() -> None:
    assert Counter(defect_of(row) for row in ROWS) == {
        None: 241,
        "a layer_idx given twice is counted in both lists": 47,
        "a budget of NaN is taken for zero": 3,
        "the budget is broken by the working set of the recompute": 7,
        "selective misses its count": 1,
        "selective is front-loaded": 1,
    }


@pytest.mark.parametrize("row_number", [i for i, row in enumerate(ROWS) if defect_of(row) is None])
def test_reply_equals_the_recorded_one(row_number: int) -> None:
    request, reply = ROWS[row_number]["request"], ROWS[row_number]["reply"]
    profiles, strategy = profiles_of(request), strategy_of(request)
    if not reply["ok"]:
        assert reply["error"] == "InvalidParameter"
        with pytest.raises(InvalidParameterError):
            build_checkpoint_plan(profiles, strategy)
        return
    plan = build_checkpoint_plan(profiles, strategy)
    assert list(plan.checkpointed_layers) == reply["checkpointed_layers"]
    assert list(plan.saved_layers) == reply["saved_layers"]
    assert plan.total_activation_memory_bytes == reply["total_activation_memory_bytes"]
    assert plan.total_recompute_flops == reply["total_recompute_flops"]
    assert estimate_memory_with_plan(profiles, plan) == reply["estimate_memory_with_plan"]
    assert estimate_total_recompute_flops(profiles, plan) == reply["estimate_total_recompute_flops"]

    stats, recorded = activation_stats(profiles, plan), reply["stats"]
    assert stats.peak_memory_bytes == recorded["peak_memory_bytes"]
    assert stats.total_layers == recorded["total_layers"]
    assert stats.checkpointed_layers == recorded["checkpointed_layers"]
    for exact, rounded in [
        (plan.checkpoint_ratio, reply["checkpoint_ratio"]),
        (plan.estimated_memory_reduction_ratio, reply["estimated_memory_reduction_ratio"]),
        (stats.mean_activation_size_bytes, recorded["mean_activation_size_bytes"]),
        (stats.memory_reduction_percent, recorded["memory_reduction_percent"]),
        *zip([p.recompute_cost_ratio for p in profiles], reply["recompute_cost_ratios"], strict=True),
    ]:
        assert exact == pytest.approx(rounded, rel=F32_RELATIVE_ERROR, abs=0)


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        ("a layer_idx given twice is counted in both lists", "is given twice"),
        ("a budget of NaN is taken for zero", "got NaN"),
    ],
)
def test_rows_whose_input_makes_no_sense_are_refused(defect: str, message: str) -> None:
    rows = [row for row in ROWS if defect_of(row) == defect]
    for row in rows:
        with pytest.raises(InvalidParameterError, match=message):
            build_checkpoint_plan(profiles_of(row["request"]), strategy_of(row["request"]))


def test_rows_that_break_their_budget_are_refused_and_the_named_minimum_is_met() -> None:
    rows = [row for row in ROWS if defect_of(row) == "the budget is broken by the working set of the recompute"]
    for row in rows:
        profiles = profiles_of(row["request"])
        with pytest.raises(InfeasibleBudgetError) as refused:
            build_checkpoint_plan(profiles, strategy_of(row["request"]))
        minimum_bytes = refused.value.minimum_bytes
        assert minimum_bytes == max(profile.activation_size_bytes for profile in profiles)
        plan = build_checkpoint_plan(profiles, Budget.from_bytes(minimum_bytes))
        assert estimate_memory_with_plan(profiles, plan) == minimum_bytes


def test_rows_that_miss_their_count_get_it() -> None:
    rows = [row for row in ROWS if (defect_of(row) or "").startswith("selective")]
    for row in rows:
        num_layers = len(row["request"]["profiles"])
        plan = build_checkpoint_plan(profiles_of(row["request"]), strategy_of(row["request"]))
        ratio = Fraction(row["request"]["checkpoint_ratio"])
        assert len(plan.checkpointed_layers) == int(ratio * num_layers + Fraction(1, 2))
