"""Models that make a verification see something: they tell whether a plan is at work on them, or never repeat."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import BuiltinFunctionType

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memfit.runtime.applying.forward_wrapping import WrappedForward


def is_of_a_plan(runner: object) -> bool:
    """Tell it from those that stand around forwards while a step is profiled; the way in that is in C++ is a plan's."""
    return (
        isinstance(runner, BuiltinFunctionType)
        or getattr(runner, "__module__", None) == "memfit.runtime.applying.apply"
    )


class Chain(nn.Module):
    """Four blocks of a linear layer and a GELU."""

    def __init__(self, width: int = 8, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def is_planned(self) -> bool:
        """Return whether a plan is at work on this model."""
        forwards = [vars(module).get("forward") for module in self.modules()]
        return any(is_of_a_plan(forward.runner) for forward in forwards if isinstance(forward, WrappedForward))


class DoublesUnderAPlan(Chain):
    """Twice the loss, and so twice the gradients, whenever a plan is at work."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        return loss * 2 if self.is_planned() else loss


_counters: list[Iterator[int]] = []


class NeverTheSame(Chain):
    """A loss that grows by ``growth`` from call to call, through a counter that nobody can put back."""

    def __init__(self, growth: float = 1e-6) -> None:
        super().__init__()
        self.growth = growth
        self.place = len(_counters)
        _counters.append(itertools.count())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.growth * next(_counters[self.place]))


class NeedsAPlan(Chain):
    """Runs out of memory when it runs plain on real numbers, once told to."""

    is_large = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_large and not isinstance(x, FakeTensor) and not self.is_planned():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


class Hoards(Chain):
    """Takes more memory under a plan than its profile tells: ``extra_bytes`` that live through the step."""

    extra_bytes = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.is_planned():
            # Through the graph it lives as long as what autograd saves.
            return super().forward(x) + 0 * torch.ones(self.extra_bytes // 4, requires_grad=True).square().sum()
        return super().forward(x)


class InterruptedUnderAPlan(Chain):
    """Ctrl-C in the middle of the planned step, once told to."""

    is_armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_armed and self.is_planned():
            raise KeyboardInterrupt
        return super().forward(x)
