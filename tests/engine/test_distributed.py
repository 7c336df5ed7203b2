"""Trap 12: DDP wants each gradient hook once; FSDP2 frees and refills parameters between forward and backward.

One process with the gloo backend is enough: both go through all their motions with a world of one.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import memfit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def model_and_batch() -> tuple[Blocks, Tensor]:
    torch.manual_seed(0)
    return Blocks(), torch.randn(4, 8)


@pytest.mark.usefixtures("world_of_one")
def test_trap_12_ddp_gets_each_gradient_once() -> None:
    model, batch = model_and_batch()
    plain = copy.deepcopy(model)
    plain(batch).backward()
    plan = memfit.plan(memfit.profile(model, batch), strategy=memfit.Full())
    num_calls: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: num_calls.update([name]))
    parallel = DistributedDataParallel(model)
    with memfit.apply(model, plan):
        for _ in range(2):
            parallel.zero_grad()
            parallel(batch).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert num_calls == {name: 2 for name, _ in model.named_parameters()}


@pytest.mark.usefixtures("world_of_one")
def test_trap_12_fsdp2_refills_parameters_before_they_are_read() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, batch = model_and_batch()
    plain = copy.deepcopy(model)
    plain(batch).backward()
    plan = memfit.plan(memfit.profile(model, batch), strategy=memfit.Full())
    mesh = init_device_mesh("cpu", (1,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own deprecated calls here
        memfit.apply(model, plan)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
        for _ in range(2):
            model.zero_grad()
            model(batch).backward()
    for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(sharded.grad.full_tensor(), whole.grad)
