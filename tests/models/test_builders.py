"""The built-in models: they run, fit into less memory with the same gradients, and say what sizes they cannot have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import memfit
from memfit import models
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep

SMALL: dict[str, dict[str, int]] = {
    "gpt": {"layers": 3, "width": 32, "heads": 2, "batch": 2, "length": 16, "vocabulary": 31},
    "llama": {"layers": 3, "width": 32, "heads": 4, "batch": 2, "length": 16, "vocabulary": 31},
    "resnet": {"blocks": 2, "width": 8, "batch": 2, "size": 16},
    "unet": {"depth": 2, "width": 8, "batch": 2, "size": 16},
    "vit": {"layers": 3, "width": 24, "heads": 3, "batch": 2, "size": 16, "patch": 4},
    "moe": {"layers": 3, "width": 16, "heads": 2, "batch": 2, "length": 16, "vocabulary": 31},
}


def builder(name: str) -> Callable[..., Any]:
    return getattr(models, name)


def test_every_builder_is_tried() -> None:
    assert sorted(SMALL) == models.__all__


@pytest.mark.parametrize("name", SMALL)
def test_a_model_fits_halfway_to_the_smallest_peak_with_equal_gradients(name: str) -> None:
    torch.manual_seed(0)
    model, batch, *loss = builder(name)(**SMALL[name])
    step_loss = loss[0] if loss else None
    profile = memfit.profile(model, batch, loss=step_loss)
    smallest_bytes = memfit.frontier(profile, points=8)[-1].peak_bytes
    assert smallest_bytes < profile.peak_bytes
    budget_bytes = (profile.peak_bytes + smallest_bytes) // 2
    plan = memfit.plan(profile, budget=budget_bytes)
    verification = memfit.verify(model, plan, batch, loss=step_loss)
    assert verification.gradients_equal
    assert verification.peak_bytes == plan.predicted_peak_bytes <= budget_bytes


@pytest.mark.parametrize("name", SMALL)
def test_the_blocks_of_a_model_are_found(name: str) -> None:
    model, batch, *loss = builder(name)(**SMALL[name])
    num_blocks = {"gpt": 3, "llama": 3, "vit": 3, "moe": 3, "resnet": 9, "unet": 4}[name]
    assert len(memfit.profile(model, batch, loss=loss[0] if loss else None).blocks) == num_blocks


@pytest.mark.parametrize("name", SMALL)
def test_the_usual_size_runs(name: str) -> None:
    model, batch, *loss = builder(name)()
    value = TrainingStep(model, StepArguments(batch, loss[0] if loss else None)).run_forward()
    assert value.isfinite()


def test_a_mixture_chooses_at_most_all_experts_and_counts_each_token() -> None:
    model, batch = models.moe(**SMALL["moe"], experts=2, chosen=5)
    model(batch)
    assert [block.mlp.num_routed.tolist() for block in model.blocks] == [[32, 32]] * 3


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("gpt", {"layers": 0}, "layers must be a whole number, at least 1"),
        ("gpt", {"width": 30, "heads": 4}, "heads must divide width; got heads=4, width=30"),
        ("llama", {"heads": 4, "key_heads": 3}, "key_heads must divide heads; got key_heads=3, heads=4"),
        ("vit", {"size": 30, "patch": 8}, "patch must divide size; got patch=8, size=30"),
        ("unet", {"depth": 3, "size": 20}, r"2 \*\* depth must divide size; got 2 \*\* depth=8, size=20"),
        ("moe", {"experts": 2.5}, "experts must be a whole number"),
        ("resnet", {"size": -1}, "size must be a whole number"),
    ],
)
def test_sizes_that_cannot_be_are_refused(name: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(memfit.InvalidParameterError, match=message):
        builder(name)(**sizes)
