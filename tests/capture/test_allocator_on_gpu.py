"""The allocator that plans are counted by, beside torch's own: the same count after every call of a long history."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from memfit.planning.simulate.allocator import LargeBlocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MIB = 2**20


@pytest.mark.parametrize("seed", range(5))
def test_large_blocks_are_counted_as_torch_counts_them(seed: int) -> None:
    draw = random.Random(seed)
    blocks = LargeBlocks()
    live: list[tuple[int, Tensor]] = []
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    # A pool of its own begins with nothing, whatever ran before.
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        for _ in range(300):
            if live and draw.random() < 0.47:
                address, tensor = live.pop(draw.randrange(len(live)))
                blocks.free(address)
                del tensor
            else:
                num_bytes = 512 * draw.randint(MIB // 512 + 1, 60 * MIB // 512)
                live.append((blocks.allocate(num_bytes), torch.empty(num_bytes, dtype=torch.uint8, device="cuda")))
            assert torch.cuda.memory_allocated() - before == blocks.allocated_bytes
        live.clear()
