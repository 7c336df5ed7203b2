"""Memory is exact: what a plan drops is gone, to the byte, and the peak is that of the best hand-written way."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.runtime.allocation_meter import AllocationMeter, allocated_peak
from memfit.runtime.native.native_build import native_module

WIDTH = 64
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.activation = nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, 4, width // 4)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + functional.dropout(attended, self.dropout)
        return x + functional.dropout(self.down(self.activation(self.up(self.mlp_norm(x)))), self.dropout)


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(12))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def tokens() -> Tensor:
    return torch.arange(4 * 64).reshape(4, 64) % 100


def step_peak(model: nn.Module, batch: Tensor) -> int:
    def step() -> None:
        model.zero_grad()
        model(batch).backward()

    step()
    model.zero_grad()
    return allocated_peak(step, CPU, held=[*model.parameters(), batch])


def bytes_saved_by(model: nn.Module, batch: Tensor) -> int:
    """Return what lives between forward and backward: all that autograd, or a record, keeps."""
    with AllocationMeter() as meter:
        loss = model(batch)
        assert loss.requires_grad
        return meter.live_bytes


@contextmanager
def checkpointed(model: GPT) -> Iterator[None]:
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    yield
    for block in model.blocks:
        del block.forward


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_peak_with_every_block_recomputed_is_that_of_checkpointing_each_block(dropout: float) -> None:
    torch.manual_seed(0)
    model, batch = GPT(dropout), tokens()
    plain = step_peak(model, batch)
    with checkpointed(model):
        reference = step_peak(model, batch)
    with memfit.apply(model, memfit.plan(memfit.profile(model, batch), strategy=memfit.Full())):
        planned = step_peak(model, batch)
    assert planned <= 1.01 * reference
    assert planned < 0.5 * plain


def test_saved_bytes_fall_by_exactly_the_bytes_of_the_recomputed_outputs() -> None:
    torch.manual_seed(0)
    model, batch = GPT(), tokens()
    dropped_outputs: list[int] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: dropped_outputs.append(output.nbytes))
        for module in model.modules()
        if isinstance(module, (nn.GELU, nn.LayerNorm))
    ]
    plain = bytes_saved_by(model, batch)
    for hook in hooks:
        hook.remove()
    assert len(dropped_outputs) == 12 * 3 + 1
    plan = memfit.plan(
        memfit.profile(model, batch),
        strategy=memfit.NoCheckpointing(),
        force_recompute=["*::aten.gelu", "*::aten.native_layer_norm"],
    )
    with memfit.apply(model, plan):
        planned = bytes_saved_by(model, batch)
    assert plain - planned == sum(dropped_outputs)


def test_recomputing_fewer_blocks_saves_more_bytes_in_proportion() -> None:
    torch.manual_seed(0)
    model, batch = GPT(), tokens()
    profile = memfit.profile(model, batch)
    saved = [bytes_saved_by(model, batch)]
    for num_blocks in (4, 8, 12):
        with memfit.apply(model, memfit.plan(profile, strategy=memfit.LargestLayers(num_blocks))):
            saved.append(bytes_saved_by(model, batch))
    differences = {before - after for before, after in pairwise(saved)}
    assert len(differences) == 1
    assert differences.pop() > 0


class Gated(nn.Module):
    """A product of two factors, of which one comes from something wide; autograd reads the second factor first."""

    def __init__(self, *, wide_is_read_first: bool) -> None:
        super().__init__()
        self.wide_is_read_first = wide_is_read_first
        self.gate, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).tanh()
        values = self.scale * self.wide(x).view(WIDTH, WIDTH, 4).sum(2)
        return (gate @ values if self.wide_is_read_first else values @ gate).sum()


@pytest.mark.parametrize("wide_is_read_first", [True, False])
def test_values_come_back_in_the_order_in_which_backward_reads_them(*, wide_is_read_first: bool) -> None:
    torch.manual_seed(0)
    model, batch = Gated(wide_is_read_first=wide_is_read_first), torch.randn(WIDTH, WIDTH)
    profile = memfit.profile(model, batch)
    plan = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["*"])
    with memfit.apply(model, plan):
        assert step_peak(model, batch) == plan.predicted_peak_bytes


def test_autocast_copies_of_weights_are_dropped_and_cast_again() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                for block in self.blocks:
                    x = block(x)
            return x.float().square().mean()

    torch.manual_seed(0)
    model, batch = Wide(), torch.randn(2, 256)
    plan = memfit.plan(
        memfit.profile(model, batch), strategy=memfit.NoCheckpointing(), force_recompute=["blocks.*::aten._to_copy"]
    )
    plain = bytes_saved_by(model, batch)
    model(batch).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    with memfit.apply(model, plan):
        planned = bytes_saved_by(model, batch)
        model.zero_grad()
        model(batch).backward()
    assert all(torch.equal(p.grad, expected) for p, expected in zip(model.parameters(), gradients, strict=True))
    # The copies of four weights go, and so does the copy of the batch, which is cast from what is there anyway. The
    # first weight's is needed for no gradient (the batch wants none), so that autograd never saved it.
    weight_copy, batch_copy = 256 * 256 * 2, 2 * 256 * 2
    assert plain - planned == 3 * weight_copy + batch_copy


def test_ops_outside_planned_modules_are_not_recorded(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batch = GPT(), tokens()
    plan = memfit.plan(
        memfit.profile(model, batch), strategy=memfit.NoCheckpointing(), force_recompute=["blocks.3.*::aten.gelu"]
    )
    assert plan.recorded_modules == ("blocks.3.activation",)
    # The linear layer after it is what saves its result.
    assert plan.hooked_modules == ("blocks.3.down",)
    seen: list[str] = []
    if engine == "Python":
        dispatch = memfit.runtime.engine.tape.Tape.__torch_dispatch__

        def recording(self: object, op: object, *args: object, **kwargs: object) -> object:
            seen.append(str(op))
            return dispatch(self, op, *args, **kwargs)

        monkeypatch.setattr(memfit.runtime.engine.tape.Tape, "__torch_dispatch__", recording)
        with memfit.apply(model, plan):
            model(batch).backward()
        assert seen == ["aten.gelu.default"]
        return
    native = native_module()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: seen.append(name) if native.is_recording() else None)
    activation = model.blocks[3].activation
    forward = activation.forward
    # Hooks run around what stands in for forward; this runs inside it.
    activation.forward = lambda x: (seen.append(f"inside: {native.is_recording()}"), forward(x))[1]
    with memfit.apply(model, plan):
        model(batch).backward()
    assert seen == ["inside: True"]
