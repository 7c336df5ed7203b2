"""A model that is changed after its plan was made: a message names what was done, and gradients stay right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfit


class Block(nn.Module):
    """A block that can be recomputed as a whole, with the switch that transformers' blocks have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.gradient_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def switch(self, on: bool) -> None:
        for block in self.blocks:
            block.gradient_checkpointing = on

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if block.gradient_checkpointing else block(x)
        return x.square().mean()


def warned_by(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture(params=["one size", "by size"])
def fitted(request: Any) -> memfit.Fitted:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(64, 8)
    budget = memfit.profile(model, x).peak_bytes * 3 // 4
    if request.param == "one size":
        return memfit.fit(model, x, budget=budget)
    return memfit.fit(model, batches=[torch.randn(8, 8), x], budget=budget)


def test_checkpointing_that_is_switched_on_after_the_plan_is_named_once(fitted: memfit.Fitted) -> None:
    model, x = fitted.model, torch.randn(64, 8)
    plain = gradients(model, x)
    model.switch(True)
    found: list[Tensor] = []
    (told,) = warned_by(lambda: found.extend(gradients(model, x)))
    assert told.startswith("gradient checkpointing was switched on after the plan was made (gradient_checkpointing of")
    assert all(map(torch.equal, found, plain))
    assert warned_by(lambda: gradients(model, x)) == []
    model.switch(False)
    assert warned_by(lambda: gradients(model, x)) == []
    model.switch(True)
    assert len(warned_by(lambda: gradients(model, x))) == 1


def test_modules_that_are_replaced_after_the_plan_are_named(fitted: memfit.Fitted) -> None:
    model, x = fitted.model, torch.randn(64, 8)
    model.blocks[1].up = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32))
    (told,) = warned_by(lambda: gradients(model, x))
    assert "'blocks.1.up' is another Sequential now" in told
    assert warned_by(lambda: gradients(model, x)) == []
    del model.blocks[2]
    (told,) = warned_by(lambda: gradients(model, x))
    assert "'blocks' has 2 modules now, and had 3" in told


def test_low_rank_adapters_that_are_added_after_the_plan_are_named() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, x = Model(), torch.randn(64, 8)
    budget = memfit.profile(model, x).peak_bytes * 3 // 4
    with memfit.fit(model, x, budget=budget):
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up"]))
        (told,) = warned_by(lambda: gradients(adapted, x))
    assert "'blocks.0.up' is another Linear now" in told


def test_checkpointing_before_the_plan_is_named_by_every_message() -> None:
    model, x = Model(), torch.randn(64, 8)
    model.switch(True)
    with pytest.warns(UserWarning, match="uses gradient checkpointing"):
        memfit.profile(model, x)
    with (
        pytest.warns(UserWarning, match=r"uses gradient checkpointing \(gradient_checkpointing of 'blocks.0' is on\)"),
        pytest.raises(memfit.InfeasibleBudgetError, match="switch it off"),
    ):
        memfit.fit(model, x, budget=1000)
