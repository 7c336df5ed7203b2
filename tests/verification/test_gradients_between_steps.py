"""Gradients that a step leaves to the next one count, wherever in the step they are cleared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.loop_peaks import CPU
from torch import Tensor, nn

import memfit
from memfit.runtime.allocation_meter import AllocationMeter
from memfit.runtime.applying.batch_tensors import tensors_of

WIDTH = 32


def network() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)) for _ in range(3)))


def clearing(model: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> Callable[[Tensor], Tensor]:
    """Return a step that clears gradients at one of the places where training loops do."""

    def step(batch: Tensor) -> Tensor:
        if where == "first":
            optimizer.zero_grad()
        loss = model(batch).square().mean()
        if where == "after the forward pass":
            optimizer.zero_grad()
        if where == "filled with zeros after the forward pass":
            optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        if where == "last":
            optimizer.zero_grad()
        return loss.detach()

    return step


def adversaries(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """Return a step of a GAN, in which each part's gradients are cleared at another place."""
    generator, critic = model

    def step(batch: Tensor) -> Tensor:
        made = generator(batch)
        optimizers[1].zero_grad()
        (critic(made.detach()) - critic(batch)).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = -critic(made).mean()
        loss.backward()
        optimizers[0].step()
        return loss.detach()

    return step


def peaks_of_loop(
    step: Callable[[Tensor], Tensor],
    batch: Tensor,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    clear_outside: bool,
    num_steps: int = 3,
) -> list[int]:
    """Return the peaks of the first steps of a loop."""
    peaks = []
    for _ in range(num_steps):
        if clear_outside:
            model.zero_grad()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        states = tensors_of([list(optimizer.state.values()) for optimizer in optimizers])
        with AllocationMeter([*model.parameters(), *gradients, *states, batch]) as meter:
            del gradients, states
            step(batch)
        peaks.append(meter.peak_bytes)
    model.zero_grad()
    return peaks


@pytest.mark.parametrize(
    "where",
    [
        "first",
        "after the forward pass",
        "filled with zeros after the forward pass",
        "last",
        "outside",
        "adversaries",
    ],
)
def test_the_step_is_measured_with_the_gradients_that_the_step_before_left(where: str) -> None:
    def new() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(network(), network())
        optimizers = [torch.optim.Adam(part.parameters()) for part in model]
        if where == "adversaries":
            return model, optimizers, adversaries(model, *optimizers)
        optimizers = [torch.optim.Adam(model.parameters())]
        return model, optimizers, clearing(model, optimizers[0], where)

    batch = torch.randn(128, WIDTH)
    model, optimizers, step = new()
    plain_peaks = peaks_of_loop(step, batch, model, optimizers, where == "outside")
    model, optimizers, step = new()
    profile = memfit.profile(model, batch, step=step)
    assert profile.device == str(CPU)
    assert profile.peak_bytes == max(plain_peaks)
    fitted = memfit.fit(model, batch, step=step, budget=int(0.8 * profile.peak_bytes))
    assert all(parameter.grad is None for parameter in model.parameters())
    peaks = peaks_of_loop(step, batch, model, optimizers, where == "outside")
    assert max(peaks) == fitted.plan.predicted_peak_bytes


def test_a_step_that_steps_its_optimizer_now_and_then_is_warned_of_and_measured_with_the_optimizer_given() -> None:
    torch.manual_seed(0)
    model, batch = network(), torch.randn(128, WIDTH)
    optimizer = torch.optim.Adam(model.parameters())
    num_steps = 0

    def step(batch: Tensor) -> Tensor:
        nonlocal num_steps
        loss = model(batch).square().mean()
        loss.backward()
        num_steps += 1
        if num_steps % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    with pytest.warns(UserWarning, match="step= refers to an optimizer and did not step it"):
        memfit.profile(model, batch, step=step)
    profile = memfit.profile(model, batch, step=step, optimizer=optimizer, gradients="kept")
    assert num_steps == 0
    peaks = peaks_of_loop(step, batch, model, [optimizer], False, num_steps=8)
    assert profile.peak_bytes == max(peaks)
