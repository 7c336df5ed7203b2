"""The batch size that trains the most samples per second within a budget.

python examples/tune.py
"""

from __future__ import annotations

import torch
from torch import nn

import memfit


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4)))
    tuned = memfit.tune(
        model,
        lambda size: torch.randn(size, 64),
        budget="1MiB",
        sizes=[64, 128, 256],
        loss=lambda output: output.square().mean(),
    )
    print(tuned)
    print(f"{tuned.size} samples a step")
    tuned.fitted.remove()


if __name__ == "__main__":
    main()
