"""A budget for a model that FSDP2 shards over processes; all of them run by the same plan.

torchrun --nproc-per-node 2 examples/fsdp2_torchrun.py
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memfit


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    on_gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", distributed.get_rank() % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(4))).to(device)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(512, 64, device=device)

    def loss(output: Tensor) -> Tensor:
        return output.square().mean()

    # Each process calls this with a batch of its own; the plan is for the fullest one.
    fitted = memfit.fit(model, batch, loss=loss, optimizer=optimizer, budget="4500KiB")
    if distributed.get_rank() == 0:
        print(fitted)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(batch)).backward()
        optimizer.step()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
