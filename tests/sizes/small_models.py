"""Models whose steps are planned in a tenth of a second, and what is measured of their steps."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from memfit.runtime.allocation_meter import allocated_peak
from memfit.runtime.applying.batch_tensors import tensors_of
from memfit.runtime.applying.forward_wrapping import plans_set_aside

CPU = torch.device("cpu")
WIDTH = 16


class Tower(nn.Module):
    """Blocks of two linear layers on rows of ``WIDTH`` numbers, of any batch shape. Returns a loss."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(num_blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of the output."""
        return self.output(x).square().mean()

    def output(self, x: Tensor) -> Tensor:
        """Return the output of the last block."""
        for block in self.blocks:
            x = x + block(x)
        return x


def run_out_of_memory() -> None:
    """Ask the CPU's allocator for more than there is, whose error is a plain RuntimeError."""
    torch.empty(1 << 50, dtype=torch.uint8)


def rows(*shape: int) -> Tensor:
    """Return a batch of random rows."""
    return torch.randn(*shape, WIDTH)


def peak_and_gradients(model: nn.Module, batch: Any) -> tuple[int, list[Tensor]]:
    """Return the peak of a step that begins without gradients, by the allocator's events, and the gradients."""
    model.zero_grad()
    gc.collect()
    arguments = batch if isinstance(batch, tuple) else (batch,)
    held = [*model.parameters(), *model.buffers(), *tensors_of(batch)]
    peak_bytes = allocated_peak(lambda: model(*arguments).backward(), CPU, held)
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return peak_bytes, gradients


def plain_peak_bytes(model: nn.Module, batch: Any) -> int:
    """Return the peak of the step without plans."""
    with plans_set_aside(model):
        return peak_and_gradients(model, batch)[0]


def check_step(model: nn.Module, batch: Any, budget_bytes: int) -> None:
    """Assert that the step stays within the budget, with the bits of the plain step's gradients."""
    with plans_set_aside(model):
        _, expected = peak_and_gradients(model, batch)
    peak_bytes, gradients = peak_and_gradients(model, batch)
    assert peak_bytes <= budget_bytes
    assert len(gradients) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
