"""Measures what the engine's own Python costs on this host, which a step that is bound by launches has to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.graph.model_profile import HostCosts
from memfit.runtime.regions import Region
from memfit.runtime.tape import Tape

_NUM_LAYERS = 20
_NUM_RUNS = 10


def measured_host_costs(forward_seconds: float, backward_seconds: float) -> HostCosts:
    """Return what the engine costs here; the plain step takes so many seconds to launch.

    A chain of layers on tensors of one element, on the host itself: next to nothing is computed, so that the difference
    between two ways to run it is what one of them does in Python. The least of several runs is the least disturbed one.
    """
    chain = _Chain(_one(1, 1), _one(1))
    model = nn.Identity()

    def seconds_in(region: Region, *, backward: bool = False) -> float:
        def run() -> None:
            tape = Tape()
            result = tape.run(region, chain.forward, (), {})
            tape.close()
            if backward:
                result.backward()

        return _least_seconds(run)

    dropping = {"aten.addmm": True, "aten.gelu": True}
    plain = _least_seconds(chain.forward)
    plain_step = _least_seconds(lambda: chain.forward().backward())
    recorded = seconds_in(Region("", model, {}, watches=False)) - plain
    dropped = seconds_in(Region("", model, dropping, watches=False)) - plain - recorded
    watched = seconds_in(Region("", model, {}, records=False), backward=True) - plain_step
    everything = seconds_in(Region("", model, dropping), backward=True) - plain_step
    both, tape = Region("", model, {}), Tape()
    entries = _least_seconds(lambda: [tape.run(both, int, (), {}) for _ in range(_NUM_LAYERS)])
    tape.close()
    return HostCosts(
        forward=forward_seconds,
        backward=backward_seconds,
        recorded_op=max(recorded, 0.0) / chain.num_ops,
        dropped_op=max(dropped, 0.0) / chain.num_ops,
        entry=entries / _NUM_LAYERS,
        watched_save=max(watched, 0.0) / chain.num_saves,
        replayed_op=max(everything - recorded - dropped - watched, 0.0) / chain.num_ops,
    )


@dataclass(frozen=True)
class _Chain:
    """Linear layers and activations: each two ops, three views, and three tensors for autograd to save."""

    weight: Tensor
    bias: Tensor
    num_ops = 2 * _NUM_LAYERS
    num_saves = 3 * _NUM_LAYERS

    def forward(self) -> Tensor:
        x = _one(1, 1, 1)
        for _ in range(_NUM_LAYERS):
            x = functional.gelu(functional.linear(x, self.weight, self.bias))
        return x


def _one(*size: int) -> Tensor:
    return torch.ones(size, device="cpu", dtype=torch.float32, requires_grad=True)


def _least_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_NUM_RUNS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)
