"""Parts of a step in which no plan recomputes or offloads anything are named in its profile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.zoo import BY_NAME
from tests.loop_peaks import peaks_of_steps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfit


class Blocks(nn.Module):
    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x.sum()


def notes_of(model: nn.Module, batch: Any, **arguments: Any) -> tuple[str, ...]:
    return memfit.profile(model, batch, **arguments).notes


def test_an_ordinary_step_has_no_notes() -> None:
    assert notes_of(Blocks(), torch.randn(4, 8)) == ()


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_modules_under_a_checkpoint_are_named(use_reentrant: bool, mode: Any) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (note,) = notes_of(Blocks(use_reentrant), x, mode=mode)
    assert note == (
        "blocks.2 and 2 more modules are recomputed as a whole in the backward pass (torch.utils.checkpoint): memfit "
        "cannot plan inside"
    )


def test_compiled_modules_are_named() -> None:
    model, batch, loss = BY_NAME["compiled-block"].build()
    (note,) = notes_of(model, batch, loss=loss)
    assert note.startswith("blocks.1 is compiled by torch.compile: what compiled code saves stays saved")


def test_nested_tensors_are_named() -> None:
    model, batch, loss = BY_NAME["jagged-batch"].build()
    (note,) = notes_of(model, batch, loss=loss)
    assert note.startswith("autograd saves tensors of the kind NestedTensor, which are opaque to memfit")


def test_a_cache_of_keys_and_values_is_named_in_the_error_of_a_budget_that_is_too_small() -> None:
    class Caching(Blocks):
        def forward(self, x: Tensor) -> Any:
            keys = [block(x) for block in self.blocks]
            return SimpleNamespace(loss=torch.stack(keys).square().sum(), past_key_values=keys)

    profile = memfit.profile(Caching(), torch.randn(4, 8))
    assert profile.notes[0].startswith("the model returns a cache of keys and values")
    assert profile.notes[0] in repr(profile)
    with pytest.raises(
        memfit.InfeasibleBudgetError, match="What limits plans for this step: the model returns a cache"
    ):
        memfit.plan(profile, budget=100)


def test_the_error_of_a_budget_that_is_too_small_names_the_ops_that_cannot_be_replayed() -> None:
    class Noisy(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) * torch.rand(64, 8)
            return x.sum()

    profile = memfit.profile(Noisy(), torch.randn(64, 8))
    with pytest.raises(
        memfit.InfeasibleBudgetError, match=r"what cannot be replayed stays saved: 6\.00 KiB of aten\.r"
    ):
        memfit.plan(profile, budget=100)
    profile = memfit.profile(Blocks(), torch.randn(64, 8))
    with pytest.raises(memfit.InfeasibleBudgetError) as caught:
        memfit.plan(profile, budget=100)
    assert "cannot be replayed" not in str(caught.value)


def test_what_a_checkpoint_keeps_of_a_value_made_in_another_module_is_dropped_as_predicted() -> None:
    class Embedded(Blocks):
        def __init__(self) -> None:
            super().__init__(use_reentrant=False)
            self.embedding = nn.Embedding(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.embedding(x))

    torch.manual_seed(0)
    model, tokens = Embedded(), torch.arange(256) % 16
    profile = memfit.profile(model, tokens)
    plan = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["embedding::*"])
    assert plan.predicted_peak_bytes < profile.peak_bytes
    with memfit.apply(model, plan):
        assert peaks_of_steps(model, tokens, lambda output: output) == [plan.predicted_peak_bytes] * 3
