"""`fit_prepared` in a loop of accelerate: losses as without, peaks within the budget, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from examples.accelerate_loop import Block, train
from tests.integrations.step_peaks import StepPeaks
from torch import Tensor, nn

from memfit.integrations.accelerate import fit_prepared

# torch and the frameworks warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore")


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def prepared() -> tuple[Any, ...]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(*(Block(16) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return (accelerator, *accelerator.prepare(model, optimizer, schedule))


def batch_of_step(number: int) -> Tensor:
    return torch.randn(128, 16, generator=torch.Generator().manual_seed(number))


def steps(
    parts: tuple[Any, ...],
    num_steps: int,
    watched: StepPeaks | None = None,
    *,
    batch_of: Callable[[int], Tensor] = batch_of_step,
) -> list[float]:
    accelerator, model, optimizer, schedule = parts
    if watched is not None:
        watched.begin(model, optimizer)
    losses = []
    for number in range(num_steps):
        batch = batch_of(number)
        with accelerator.accumulate(model):
            loss = loss_of(model(batch))
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        del loss, batch
        if watched is not None:
            watched.end_step()
    if watched is not None:
        watched.end()
    return losses


def test_ten_steps_are_those_of_plain_training_and_each_is_within_the_budget() -> None:
    plain_peaks, watched = StepPeaks(), StepPeaks()
    plain_losses = steps(prepared(), 10, plain_peaks)
    budget_bytes = 85 * max(plain_peaks.peaks) // 100
    parts = prepared()
    fitted = fit_prepared(*parts[:3], torch.randn(128, 16), loss=loss_of, budget=budget_bytes)
    assert fitted.verification.gradients_equal
    assert steps(parts, 10, watched) == plain_losses
    assert max(watched.peaks) <= budget_bytes


def test_a_saved_state_is_loaded_with_a_plan_applied(tmp_path: Path) -> None:
    plain = prepared()
    steps(plain, 4)
    expected = steps(plain, 4)
    parts = prepared()
    fit_prepared(*parts[:3], torch.randn(128, 16), loss=loss_of, budget="400KiB")
    steps(parts, 4)
    parts[0].save_state(str(tmp_path))
    resumed = prepared()
    fit_prepared(*resumed[:3], torch.randn(128, 16), loss=loss_of, budget="400KiB")
    resumed[0].load_state(str(tmp_path))
    assert steps(resumed, 4) == expected


def test_the_example_trains_as_without_memfit() -> None:
    assert train(budget="270KiB") == train(budget=None)
