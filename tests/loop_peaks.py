"""Peaks of the first steps of a training loop, as a user writes one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memfit.runtime.allocation_meter import allocated_peak
from memfit.runtime.applying.batch_tensors import tensors_of

CPU = torch.device("cpu")


def peaks_of_steps(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    num_steps: int = 3,
    more_held: Sequence[Tensor] = (),
) -> list[int]:
    """Return the peak of each of the first steps, which begin without gradients and hold nothing but the loss.

    ``loss`` is a function of the output. What the model, the batch and the optimizer hold counts, and ``more_held``.
    """

    def step() -> None:
        if isinstance(batch, dict):
            value = loss(model(**batch))
        else:
            value = loss(model(*batch) if isinstance(batch, (tuple, list)) else model(batch))
        value.backward()
        if optimizer is not None:
            optimizer.step()

    peaks = []
    for _ in range(num_steps):
        model.zero_grad(set_to_none=True)
        gc.collect()
        held = [*model.parameters(), *model.buffers(), *tensors_of(batch), *more_held]
        if optimizer is not None:
            held += tensors_of(list(optimizer.state.values()))
        gc.disable()
        try:
            peaks.append(allocated_peak(step, CPU, held))
        finally:
            gc.enable()
    model.zero_grad(set_to_none=True)
    return peaks
