"""A budget for Lightning's Trainer: one callback, nothing else changes.

python examples/lightning_module.py        # needs lightning
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import Tensor, nn

from memfit.integrations.lightning import MemfitCallback


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Regression(lightning.LightningModule):
    """Maps vectors to numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(16) for _ in range(4)))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.blocks(batch).square().mean()
        self.log("loss", loss, on_step=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(
    module: Regression,
    callbacks: Sequence[lightning.Callback],
    checkpoint: str | None = None,
    loader: Iterable[Tensor] | None = None,
    **options: Any,
) -> Regression:
    """Train ``module`` from the same weights on the same numbers every time, or from ``checkpoint``, and return it."""
    torch.manual_seed(0)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": 6, "enable_checkpointing": False, **options},
    )
    rows = torch.randn(512, 16)
    loader = torch.utils.data.DataLoader(rows, batch_size=64) if loader is None else loader
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return module


def main() -> None:
    callback = MemfitCallback("270KiB")
    print(train(Regression(), [callback]).losses)
    print(callback.fitted)


if __name__ == "__main__":
    main()
