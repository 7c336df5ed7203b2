"""The kernels that replay several ops at once, on a CUDA device: torch's own bits, and no more memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.runtime.fusing import fusing
from memfit.runtime.fusing.pointwise_ops import POINTWISE_OPS
from memfit.runtime.native.native_build import native_module

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Forward = Callable[[Tensor], Tensor]


class Gated(nn.Module):
    """A block of a transformer without its attention, with the norm and the gate that most have."""

    def __init__(self, width: int, act: Forward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        gate, up = self.up(self.weight * (wide * scale).to(x.dtype)).chunk(2, -1)
        return x + self.down(self.act(gate) * up)


def model_and_batch(dtype: torch.dtype, act: Forward = functional.silu) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Gated(256, act) for _ in range(4))).to("cuda", dtype)
    return model, torch.randn(8, 64, 256, device="cuda", dtype=dtype)


def loss(output: Tensor) -> Tensor:
    return output.float().square().mean()


def gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss(model(batch)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def num_launched() -> int:
    num: int = native_module().num_fused_kernels_launched()
    return num


def all_that_replays(model: nn.Module, batch: Tensor) -> memfit.Plan:
    profile = memfit.profile(model, batch, loss=loss)
    return memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["*"])


ACTIVATIONS: dict[str, Forward] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu-tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gradients_are_those_of_the_plain_model(act: str, dtype: torch.dtype) -> None:
    model, batch = model_and_batch(dtype, ACTIVATIONS[act])
    expected = gradients(model, batch)
    with memfit.apply(model, all_that_replays(model, batch)):
        before = num_launched()
        found = gradients(model, batch)
        assert num_launched() > before
    assert len(found) == len(expected) == 12
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("type_name", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("name", POINTWISE_OPS)
def test_every_op_has_the_bits_of_torchs_own_kernels_here(name: str, type_name: str) -> None:
    """Were one not trusted on this machine, it would be replayed by itself: right, and slower than need be."""
    known = POINTWISE_OPS[name]
    kernels = fusing._kernels_on(0)
    for text in known.expressions:
        op = f"{name}.{text}" if text else name
        inputs = f"{type_name} flat;" * known.num_tensors
        operands = " ".join(f"i{number}" for number in range(known.num_tensors))
        has_kernel = kernels.kernel_of(f"{inputs}{op} {type_name} kept {operands};") != 0
        assert has_kernel == (known.is_exact or type_name != "f32")


def peak_bytes(model: nn.Module, batch: Tensor) -> int:
    for _ in range(2):
        gradients(model, batch)
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    gradients(model, batch)
    return torch.cuda.max_memory_allocated()


def test_the_peak_is_no_higher_than_op_by_op() -> None:
    model, batch = model_and_batch(torch.bfloat16)
    with memfit.apply(model, all_that_replays(model, batch)):
        fused = peak_bytes(model, batch)
        native = native_module()
        native.fuse_nothing()
        try:
            assert fused <= peak_bytes(model, batch)
        finally:
            fusing.start_fusing(native)


def test_a_captured_step_has_them_too() -> None:
    model, batch = model_and_batch(torch.bfloat16)
    expected = gradients(model, batch)
    with memfit.apply(model, all_that_replays(model, batch)):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                gradients(model, batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        model.zero_grad()
        before = num_launched()
        with torch.cuda.graph(graph, stream=side):
            loss(model(batch)).backward()
        assert num_launched() > before
        graph.replay()
        torch.cuda.synchronize()
        found = [parameter.grad for parameter in model.parameters()]
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert torch.equal(one, other)
