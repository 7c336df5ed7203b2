"""Models with compiled blocks, each measured once in a session: compiling takes seconds on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from tests.compiled.compiled_models import (
    WIDTH,
    dropout_model,
    experts_model,
    outputs_model,
    passed_on_model,
    small_model,
    wide_ends_model,
)
from torch import Tensor, nn

import memfit
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.graph.compiled_data.compiled_blocks import CompiledProfile
from memfit.models import gpt, llama
from memfit.profiling import with_compiled_blocks

SMALL = {"layers": 3, "width": WIDTH, "heads": 2, "batch": 8, "length": 32, "vocabulary": 64}
BUILDERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "gpt": lambda: gpt(**SMALL),
    "llama": lambda: llama(**SMALL, key_heads=1),
    "dropout": dropout_model,
    "experts": experts_model,
    "small": small_model,
    "outputs": outputs_model,
    "passed on": passed_on_model,
    "wide ends": wide_ends_model,
}


class Case(NamedTuple):
    """A model with a batch, and its profile with compiled blocks."""

    model: nn.Module
    batch: Tensor
    profile: memfit.ModelProfile

    def plan(self, share: float) -> memfit.Plan:
        """Return the plan for a budget between the smallest peak (0) and that of the fastest plan (1)."""
        points = memfit.frontier(self.profile, points=2)
        low, high = points[-1].peak_bytes, points[0].peak_bytes
        return memfit.plan(self.profile, budget=low + round(share * (high - low)))


@functools.cache
def measured(name: str) -> Case:
    """Return the model of that name with its profile, in which what saves less takes longer by a fixed amount."""
    model, batch = BUILDERS[name]()
    profile = compiled_profile(model, batch)
    assert profile.compiled is not None
    return Case(model, batch, replace(profile, compiled=with_fixed_seconds(profile.compiled)))


def compiled_profile(model: nn.Module, batch: Tensor, num_cuts: int = 1) -> memfit.ModelProfile:
    """Return the profile with partitions that save everything and the least, and torch's where ``num_cuts`` is 2."""
    step = TrainingStep(model, StepArguments(batch, None, None, None, None, "fresh"))
    return with_compiled_blocks(memfit.profile(model, batch), step, num_cuts=num_cuts)


def with_fixed_seconds(profile: CompiledProfile) -> CompiledProfile:
    """Return the profile with seconds that do not depend on the machine: a microsecond for each
    KiB that a block does not hold, milliseconds for what is recomputed outside blocks."""
    blocks = []
    for block in profile.blocks:
        most = max(each.held_bytes for each in block.measured)
        measured = (replace(each, seconds=1e-3 + (most - each.held_bytes) * 1e-9) for each in block.measured)
        blocks.append(replace(block, measured=tuple(measured)))
    outside = tuple(replace(each, seconds=(2 + place) * 1e-3) for place, each in enumerate(profile.outside))
    return replace(profile, blocks=tuple(blocks), outside_seconds=1e-3, plain_seconds=5e-3, outside=outside)


def gradients(model: nn.Module, batch: Tensor, seed: int = 5) -> list[Tensor]:
    """Return the gradients of a step, and after it a random number."""
    model.zero_grad()
    torch.manual_seed(seed)
    model(batch).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None] + [torch.rand(1)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether all tensors have the same numbers."""
    return all(map(torch.equal, a, b))
