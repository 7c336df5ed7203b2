"""Small models, each rank with a batch of its own."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, *, pause_seconds: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self._pause_seconds = pause_seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._pause_seconds)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def bare(rank: int, *, num_rows: int = 128, pause_seconds: float = 0.0) -> tuple[Blocks, Tensor]:
    """Return the same model in all ranks, and a batch of this one."""
    torch.manual_seed(0)
    model = Blocks(pause_seconds=pause_seconds)
    torch.manual_seed(1 + rank)
    return model, torch.randn(num_rows, WIDTH)


def in_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    """Shard the model's blocks, and what is left, over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained(model: nn.Module, batch: Tensor, num_steps: int = 3) -> list[float]:
    """Return the losses of a few steps with Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
