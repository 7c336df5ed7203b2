"""Profiling runs real steps and leaves everything as it was: weights, state, batch, gradients, random generators."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.step_comparison import assert_same, leaves, look, trace_steps
from tests.engine.zoo import ZOO, Example
from torch import Tensor, nn

import memfit


@pytest.mark.parametrize("example", ZOO, ids=str)
def test_profile_leaves_everything_as_it_was(example: Example) -> None:
    model, batch, loss = example.build()
    # A gradient that was there before, as in the middle of an accumulation.
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = look("it", model, batch) | dict(leaves("weight", dict(model.state_dict())))
    with example.context():
        memfit.profile(model, batch, loss=loss)
    assert_same(before, look("it", model, batch) | dict(leaves("weight", dict(model.state_dict()))))
    # And what cannot be seen from outside: the steps that follow are those of a model never profiled.
    assert_same(
        trace_steps(example.build(), context=example.context),
        trace_steps((model, batch, loss), context=example.context),
    )


class CountsInAnObject(nn.Module):
    """Scales by how often it ran, which it counts in an object inside a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.states = [SimpleNamespace(num_calls=0)]

    def forward(self, x: Tensor) -> Tensor:
        self.states[0].num_calls += 1
        for layer in self.layers:
            x = torch.tanh(layer(x) * self.states[0].num_calls)
        return x

    def state(self) -> Any:
        return self.states[0].num_calls


class DropsBranches(nn.Module):
    """Drops each branch half of the time, by NumPy."""

    def __init__(self, generator: np.random.Generator | np.random.RandomState) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Tanh()) for _ in range(6))
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.generator.uniform() < 0.5:
                x = x + layer(x)
        return x + self.layers[0](x)

    def state(self) -> Any:
        bits = self.generator.bit_generator if isinstance(self.generator, np.random.Generator) else None
        return repr(self.generator.get_state() if bits is None else bits.state)  # type: ignore[union-attr]


STATEFUL: dict[str, Callable[[], Any]] = {
    "object in a list": CountsInAnObject,
    "NumPy generator": lambda: DropsBranches(np.random.default_rng(1)),
    "NumPy random state": lambda: DropsBranches(np.random.RandomState(1)),
}


@pytest.mark.parametrize("build", STATEFUL.values(), ids=STATEFUL)
def test_state_in_objects_and_generators_is_put_back_between_steps_and_at_the_end(build: Callable[[], Any]) -> None:
    model, batch = build(), torch.randn(16, 8)
    before = model.state()
    profile = memfit.profile(model, batch)
    assert model.state() == before
    assert memfit.profile(model, batch).peak_bytes == profile.peak_bytes
    # The plain step is the same each time, and so is the planned one.
    plan = memfit.plan(profile, strategy=memfit.Full(), force_recompute=["*"])
    verification = memfit.verify(model, plan, batch)
    assert plan.recorded_modules
    assert verification.plain_reproducible
    assert verification.gradients_equal
    assert model.state() == before


def test_state_of_a_loss_that_is_a_module_is_put_back() -> None:
    class Counting(nn.MSELoss):
        num_calls = 0

        def forward(self, output: Tensor, target: Tensor | None = None) -> Tensor:
            self.num_calls += 1
            return output.square().mean() * self.num_calls

    loss = Counting()
    memfit.profile(nn.Linear(4, 4), torch.ones(2, 4), loss=loss)
    assert loss.num_calls == 0


class WritesUnusually(nn.Module):
    """Writes one buffer in inference mode, and another through elements that do not fill it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("turned", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            self.seen.add_(x.mean(0))
        torch.view_as_complex(self.turned[:2]).mul_(1j)
        self.turned[2:].add_(1)
        return torch.tanh(self.layer(x)).sum()


def test_unusual_writes_are_undone() -> None:
    model = WritesUnusually()
    memfit.profile(model, torch.ones(4, 8))
    assert torch.equal(model.seen, torch.zeros(8))
    assert torch.equal(model.turned, torch.arange(3.0))
