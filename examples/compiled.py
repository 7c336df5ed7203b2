"""A model whose repeated blocks run compiled: the plan chooses what each of them saves for the backward pass.

python examples/compiled.py        # compiling takes about half a minute
"""

from __future__ import annotations

import torch
from torch import nn

import memfit


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    batch, targets = torch.randn(512, 64), torch.randn(512, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_of(output):
        return nn.functional.mse_loss(output, targets)

    fitted = memfit.fit(model, batch, budget="90%", compile=True, loss=loss_of, optimizer=optimizer)
    print(fitted)
    print(fitted.plan)

    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(batch))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
    fitted.remove()


if __name__ == "__main__":
    main()
