"""A budget for a loop with accelerate, which accumulates gradients over two batches.

python examples/accelerate_loop.py        # needs accelerate
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

from memfit.integrations.accelerate import fit_prepared


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(budget: str | None, num_steps: int = 6) -> list[float]:
    """Train within ``budget``, or plainly, and return the losses."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(*(Block(16) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(torch.randn(256, 16), batch_size=64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if budget is not None:
        fitted = fit_prepared(
            accelerator,
            model,
            optimizer,
            next(iter(loader)),
            budget=budget,
            loss=lambda output: output.square().mean(),
        )
        print(fitted)
    losses = []
    while len(losses) < num_steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train(budget="270KiB"))
