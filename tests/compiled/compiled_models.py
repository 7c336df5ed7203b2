"""Small models whose blocks are compiled in tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 32


class DropoutBlock(nn.Module):
    """An MLP with dropout inside, and a batch norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with what the MLP adds."""
        hidden = self.dropout(nn.functional.gelu(self.up(x)))
        return x + self.norm(self.dropout(self.down(hidden)))


class DropoutModel(nn.Module):
    """Blocks in bfloat16 autocast; the mean square of what they return."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(DropoutBlock() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        x = self.into(x)
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                x = block(x)
        return x.float().square().mean()


class BranchingBlock(nn.Module):
    """Branches on a number that it computes, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` through a layer, doubled where it has many positive elements."""
        return self.linear(x) * 2 if (x > 0).sum() > 8 else self.linear(x)


def dropout_model() -> tuple[nn.Module, Tensor]:
    """Return the model and a batch."""
    torch.manual_seed(0)
    return DropoutModel(), torch.randn(512, WIDTH)
