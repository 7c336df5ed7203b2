"""Batches of many lengths within one budget: short ones run plain, long ones recompute more.

python examples/lengths.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import memfit
from memfit import models


def main() -> None:
    torch.manual_seed(0)
    model, _ = models.gpt(layers=3, width=32, heads=2, batch=4, length=64, vocabulary=65)

    def batch_of(length: int) -> Tensor:
        return torch.randint(0, 65, (4, length))

    longest = memfit.profile(model, batch_of(64))
    fitted = memfit.fit(model, batches=[batch_of(32), batch_of(64)], budget=longest.peak_bytes * 4 // 5)
    print(fitted)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for length in (32, 48, 64):
        optimizer.zero_grad()
        loss = model(batch_of(length))
        loss.backward()
        optimizer.step()
        print(f"length {length}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
