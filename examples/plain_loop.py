"""A plain training loop of a small GPT, fitted into three quarters of the memory it needs.

python examples/plain_loop.py
"""

from __future__ import annotations

import torch

import memfit
from memfit import models


def main() -> None:
    torch.manual_seed(0)
    model, batch = models.gpt(layers=4, width=32, heads=2, batch=4, length=32)
    optimizer = torch.optim.AdamW(model.parameters())

    profile = memfit.profile(model, batch, optimizer=optimizer)
    fitted = memfit.fit(model, batch, budget=profile.peak_bytes * 3 // 4, optimizer=optimizer)
    print(fitted)

    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
