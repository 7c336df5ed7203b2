"""Profiles on a CUDA device: memory as the allocator counts it, times as events measure them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.capture.measuring.clocks import moments_on
from memfit.capture.measuring.link import measured_link
from memfit.capture.recording.plain_timeline import plain_timeline_bytes
from memfit.graph.model_profile import Phase
from memfit.runtime.torch_internals import keep_gpu_busy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Block(nn.Module):
    """A transformer block with fused attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = width // 64
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.projections(self.first_norm(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second_norm(x))


def gpt(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Return a model that keeps the device busy, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(1024) for _ in range(6)), nn.Linear(1024, 8192)).to("cuda", dtype)
    return model, torch.randn(8, 1024, 1024, device="cuda", dtype=dtype)


@pytest.fixture(autouse=True)
def nothing_cached() -> None:
    torch.cuda.empty_cache()


def test_moments_are_those_of_the_device_not_of_the_host() -> None:
    moments = moments_on(torch.device("cuda"))
    for num_cycles in (0, 2_000_000, 20_000_000):
        keep_gpu_busy(num_cycles)
        moments.mark()
    first, second = moments.seconds_between()
    # Launching takes microseconds. How fast cycles are depends on how long the device has been at work.
    assert second > first > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_optimizer", [False, True], ids=["plain", "adamw"])
def test_recorded_timeline_peaks_where_the_allocator_does(dtype: torch.dtype, with_optimizer: bool) -> None:
    model, batch = gpt(dtype)
    optimizer = torch.optim.AdamW(model.parameters()) if with_optimizer else None
    profile = memfit.profile(model, batch, optimizer=optimizer)
    timeline_bytes = plain_timeline_bytes(profile.ops, profile.values)
    # A large block may come out of a larger free one whole, up to 1 MiB too large; on an H200 the two were equal.
    assert max(timeline_bytes) == pytest.approx(profile.peak_bytes, rel=0.005)


def test_workspaces_of_convolutions_count_however_many_kinds_there_are() -> None:
    torch.manual_seed(0)
    widths = [32 + 8 * k for k in range(12)]
    pairs = itertools.pairwise(widths)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.SiLU()) for a, b in pairs))
    model = model.to("cuda", torch.bfloat16)
    batch = torch.randn(8, 32, 256, 256, device="cuda", dtype=torch.bfloat16)
    profile = memfit.profile(model, batch)
    backward = [op for op in profile.ops if op.op == "aten.convolution_backward"]
    assert len(backward) == 11
    assert any(op.workspace_bytes > 0 for op in backward)
    timeline_bytes = plain_timeline_bytes(profile.ops, profile.values)
    assert max(timeline_bytes) == pytest.approx(profile.peak_bytes, rel=0.005)


def test_autocast_leaves_no_copies_of_weights_behind() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(1024) for _ in range(2)), nn.Linear(1024, 8)).to("cuda")
    batch = torch.randn(2, 128, 1024, device="cuda")
    plain = memfit.profile(model, batch)
    with torch.autocast("cuda", torch.bfloat16):
        cast = memfit.profile(model, batch)
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    # The copies are half as large as the weights.
    assert beside_the_model(cast) - beside_the_model(plain) < weights_bytes // 4


def beside_the_model(profile: memfit.ModelProfile) -> int:
    """Return the bytes on the device that are none of the model's: libraries' workspaces, and what should not be."""
    (value,) = [value for value in profile.values if value.name == "(other memory on the device)"]
    return value.num_bytes


def test_a_profile_knows_what_the_host_spends() -> None:
    profile = memfit.profile(*gpt(torch.bfloat16))
    assert profile.host is not None
    assert 0 < profile.host.forward < profile.step_seconds
    assert 0 < profile.host.backward < profile.step_seconds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_seconds_of_ops_add_up_to_those_of_the_step(dtype: torch.dtype) -> None:
    model, batch = gpt(dtype)
    profile = memfit.profile(model, batch)
    seconds = {phase: sum(op.seconds for op in profile.ops if op.phase is phase) for phase in Phase}
    # A step has launches and gaps that its ops have not, and its caches are colder.
    assert sum(seconds.values()) == pytest.approx(profile.step_seconds, rel=0.15)


def test_fake_profile_has_the_ops_and_values_of_the_real_one() -> None:
    model, batch = gpt(torch.bfloat16)
    real, fake = memfit.profile(model, batch), memfit.profile(model, batch, mode="fake")
    assert [(op.module, op.op, op.inputs, op.outputs) for op in fake.ops] == [
        (op.module, op.op, op.inputs, op.outputs) for op in real.ops
    ]
    # Fake tensors cannot be tried. The last value is the rest of the device's memory, libraries' workspaces in it.
    assert fake.values[:-1] == tuple(replace(value, replays_exactly=True) for value in real.values[:-1])
    assert fake.values[-1].num_bytes == real.values[-1].num_bytes > 0
    without_workspaces = [replace(op, workspace_bytes=0) for op in real.ops]
    assert fake.peak_bytes == max(plain_timeline_bytes(without_workspaces, real.values))


def test_a_step_that_does_not_fit_says_how_to_profile_it() -> None:
    model, batch = gpt(torch.bfloat16)
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.5e9 / total_bytes)
    try:
        with pytest.raises(memfit.MemfitError, match=r"does not fit the device.*mode='fake'"):
            memfit.profile(model, batch)
        assert memfit.profile(model, batch, mode="fake").peak_bytes > 1e9
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_way_to_the_host_is_measured_and_leaves_nothing_on_the_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    allocated_bytes = torch.cuda.memory_allocated()
    link = measured_link(device)
    assert torch.cuda.memory_allocated() == allocated_bytes
    assert link is not None
    # Between what the slowest and the fastest of today's links carry, with room on both sides: the units are right.
    assert 1e8 < link.out_bytes_per_second < 1e13
    assert 1e8 < link.back_bytes_per_second < 1e13
    assert 0.0 <= link.seconds_per_copy < 1e-2
    assert 0.0 <= link.slowdown < 1.0
    assert link.host_free_bytes > 0


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_profiles_know_the_way_to_the_host(mode: Literal["real", "fake"]) -> None:
    model, batch = gpt(torch.bfloat16)
    profile = memfit.profile(model, batch, mode=mode)
    assert profile.link is not None


def test_a_host_that_lets_nothing_be_pinned_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("memfit.capture.measuring.link._pinned", refuse)
    assert measured_link(torch.device("cuda")) is None
