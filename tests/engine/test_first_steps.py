"""The first planned step keeps the budget, also where torch runs other ops under a dispatch mode than without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from tests.loop_peaks import peaks_of_steps
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.runtime.applying.apply import Applied
from memfit.runtime.engine.forward_pass import ForwardPass
from memfit.runtime.engine.native_tape import new_tape
from memfit.runtime.engine.tape import Tape

WIDTH, LENGTH, BATCH = 16, 32, 4


class Encoder(nn.Module):
    """Attention hands its output on transposed, so that linear layers get inputs that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        # Without dropout: for each replayed op, the state of a CPU's random generator takes 5 kB.
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).square().mean()


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.activation = nn.LayerNorm(WIDTH), nn.GELU()
        self.tokens_up, self.tokens_down = nn.Linear(LENGTH, 2 * LENGTH), nn.Linear(2 * LENGTH, LENGTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.tokens_down(self.activation(self.tokens_up(self.norm(x).transpose(1, 2))))
        x = x + mixed.transpose(1, 2)
        return x + self.down(self.activation(self.up(self.norm(x))))


class ConformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.convolution = nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gated = functional.glu(self.convolution(self.norm(x).transpose(1, 2)), dim=1)
        return x + self.down(functional.silu(self.up(gated.transpose(1, 2))))


class Blocks(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer encoder": Encoder,
    "mixer": lambda: Blocks(MixerBlock),
    "conformer": lambda: Blocks(ConformerBlock),
}


def batch() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


@cache
def points_of(name: str) -> tuple[memfit.FrontierPoint, ...]:
    torch.manual_seed(0)
    return memfit.frontier(memfit.profile(MODELS[name](), batch()), points=3)[1:]


@pytest.mark.parametrize("make_tape", [new_tape, Tape], ids=["C++", "Python"])
@pytest.mark.parametrize("name", MODELS)
def test_the_first_three_steps_keep_the_budget(name: str, make_tape: Callable[[], ForwardPass]) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), batch()
    for point in points_of(name):
        with Applied(model, point.plan, make_tape):
            peaks = peaks_of_steps(model, x, lambda output: output)
        assert max(peaks) <= 1.005 * point.peak_bytes
