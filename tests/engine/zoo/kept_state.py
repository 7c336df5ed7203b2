"""What modules keep from call to call and change in forward: caches, logs, moving averages, their own weights.

A forward that runs twice changes them twice; a recompute that reads them later reads something else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares
from torch import Tensor, nn

WIDTH = 7


class WeightWrittenInForward(nn.Module):
    """Clamps, decays and swaps its own weight in forward, as some regularisers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(-0.5, 0.5)
        y = torch.tanh(self.linear(x) + 2 * self.scale.detach())
        with torch.no_grad():
            self.scale.mul_(0.9)
        y = torch.tanh(self.linear(y) + 2 * self.scale.detach())
        self.scale.data = self.scale.data * 0.5
        return y * self.scale.exp()


class GrowingCache(nn.Module):
    """Appends its keys to a cache at every call and attends to all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.keys: Tensor | None = None
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        keys = self.project(x)
        self.history.append(keys.detach())
        self.keys = keys.detach() if self.keys is None else torch.cat([self.keys, keys.detach()], dim=1)
        weights = (x @ self.keys.transpose(-2, -1)).softmax(-1)
        return torch.nn.functional.gelu(x + weights @ self.keys + keys)


class ActivationLog(nn.Module):
    """Keeps a log of its activations, which nothing reads in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.num_calls = 0
        self.log: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.num_calls += 1
        self.log.append(hidden.detach().abs().mean())
        return nn.functional.gelu(hidden)


class PreallocatedCache(nn.Module):
    """Writes its keys into a fixed buffer, one slot per call: the buffer is changed after it was used."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(16, WIDTH), persistent=False)
        self.num_used = 0

    def forward(self, x: Tensor) -> Tensor:
        keys = self.project(x)
        self.cache[self.num_used] = keys.mean((0, 1)).detach()
        self.num_used += 1
        weights = (keys @ self.cache[: self.num_used].clone().T).softmax(-1)
        return torch.tanh(keys + x + weights @ (self.cache[: self.num_used] * 2))


class MovingAverage(nn.Module):
    """Normalises by a moving average that it updates in place at each call, before and after its use."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) / (self.average + 1)
        if self.training:
            self.average.lerp_(y.detach().abs().mean((0, 1)), 0.3)
        return x + torch.sigmoid(y) * (self.average + 0.5)


def in_sequence(kind: Callable[[], nn.Module], num_blocks: int = 3) -> Callable[[], Step]:
    """Return a way to build a chain of blocks of one kind."""
    return lambda: (
        nn.Sequential(*(kind() for _ in range(num_blocks))),
        torch.randn(2, 3, WIDTH),
        mean_of_squares,
    )


EXAMPLES = (
    Example("weight-written-in-forward", in_sequence(WeightWrittenInForward), has_blocks=True),
    Example("growing-cache", in_sequence(GrowingCache), has_blocks=True),
    Example("activation-log", in_sequence(ActivationLog), has_blocks=True),
    Example("preallocated-cache", in_sequence(PreallocatedCache), has_blocks=True),
    Example("moving-average", in_sequence(MovingAverage), has_blocks=True),
)
