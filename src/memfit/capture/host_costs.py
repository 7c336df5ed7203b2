"""Measures what the engine itself costs on this host, which a step that is bound by launches has to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.graph.model_profile import HostCosts, ModelProfile
from memfit.graph.plan import Decision, Plan
from memfit.planning.simulator import simulated
from memfit.planning.step import Step
from memfit.runtime.apply import Applied
from memfit.runtime.native_tape import engine_name, new_tape
from memfit.runtime.recorded_modules import Region

_NUM_LAYERS = 20
_NUM_ROUNDS = 150
# How much more than in a short loop the engine may cost in a real step.
_MOST_FACTOR = 5.0


def measured_host_costs(forward_seconds: float, backward_seconds: float) -> HostCosts:
    """Return what the engine costs here at best; the plain step takes so many seconds to launch.

    A chain of layers on tensors of one element, on the host itself: next to nothing is computed, so that the difference
    between two ways to run it is what one of them does on the host.
    """
    chain = _Chain(_one(1, 1), _one(1))
    model = nn.Identity()

    def listening_in(
        dropping: Mapping[str, bool], *, records: bool = True, watches: bool = True, backward: bool = False
    ) -> Callable[[], None]:
        known = Region("", model, dropping, records=records, watches=watches)

        def run() -> None:
            tape = new_tape()
            # In a region that it knows, the engine watches less than all saves.
            region = Region("", model, dropping, records=records) if watches else known
            result = tape.run(region, chain.forward, (), {})
            tape.close()
            if backward:
                result.backward()

        return run

    dropping = {"aten.addmm": True, "aten.gelu": True}
    # Both begin and end a forward pass, which is no part of what going into one more module costs.
    once, often = _identities(), _identities()
    with (
        Applied(once, _listening_in("0"), new_tape),
        Applied(often, _listening_in(*dict(often.named_children())), new_tape),
    ):
        added = seconds_added(
            {
                "plain": chain.forward,
                "plain step": lambda: chain.forward().backward(),
                "recorded": listening_in({}, watches=False),
                "dropped": listening_in(dropping, watches=False),
                "hooked_modules": listening_in({}, records=False, backward=True),
                "everything": listening_in(dropping, backward=True),
                "once": lambda: once(chain.bias),
                "often": lambda: often(chain.bias),
            }
        )
    recorded = added("recorded", "plain")
    dropped = added("dropped", "recorded")
    watched = added("hooked_modules", "plain step")
    replayed = added("everything", "plain step") - recorded - dropped - watched
    entries = added("often", "once")
    return HostCosts(
        forward=forward_seconds,
        backward=backward_seconds,
        recorded_op=max(recorded, 0.0) / chain.num_ops,
        dropped_op=max(dropped, 0.0) / chain.num_ops,
        module_entry=max(entries, 0.0) / (_NUM_LAYERS - 1),
        hooked_save=max(watched, 0.0) / chain.num_saves,
        # A difference of many; running an op again does not cost less than noting how to.
        replayed_op=max(replayed, dropped, 0.0) / chain.num_ops,
        hooks_only_dropped_saves=engine_name() == "C++",
    )


def with_fitted_host_costs(
    profile: ModelProfile, plan: Plan, forward_seconds: float, backward_seconds: float
) -> ModelProfile:
    """Return ``profile`` with host costs that agree with a step by ``plan`` that took so much longer to launch.

    In a real step nothing is as warm as in a short loop, and ops have more and larger arguments. No value was offloaded
    in that step: what that costs is taken to be more by as much as what was done in the forward pass.
    """
    host, link = profile.host, profile.link
    assert host is not None
    step = Step(profile)
    recomputed = {index for index in step.plannable if plan.decisions[profile.values[index].name] is Decision.RECOMPUTE}
    expected = step.listeners.cost_of(recomputed, len(simulated(step, recomputed).replayed_ops))
    in_forward = _factor(forward_seconds, expected.forward)
    in_backward = _factor(backward_seconds, expected.backward)
    fitted = replace(
        host,
        recorded_op=host.recorded_op * in_forward,
        dropped_op=host.dropped_op * in_forward,
        module_entry=host.module_entry * in_forward,
        hooked_save=host.hooked_save * in_forward,
        replayed_op=host.replayed_op * in_backward,
    )
    return replace(
        profile,
        host=fitted,
        link=None if link is None else replace(link, host_seconds=link.host_seconds * in_forward),
    )


def _factor(measured: float, expected: float) -> float:
    """Return by how much more was measured; never less, and within what a disturbance can not explain."""
    return min(max(measured / expected, 1.0), _MOST_FACTOR) if expected > 0.0 else 1.0


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


def _identities() -> nn.Sequential:
    return nn.Sequential(*(nn.Identity() for _ in range(_NUM_LAYERS)))


def _listening_in(*paths: str) -> Plan:
    return Plan({}, recorded_modules=paths, hooked_modules=paths, recompute_flops=0, fingerprint="")


def _one(*size: int) -> Tensor:
    return torch.ones(size, device="cpu", dtype=torch.float32, requires_grad=True)


def seconds_added(runs: Mapping[str, Callable[[], object]]) -> Callable[[str, str], float]:
    """Return what tells how much longer one of ``runs`` takes than another.

    They take turns, and are compared within a round: their differences are small, and a host that others use too is
    slower for moments that last many rounds. Of the faster half of the rounds, the one in the middle tells. Each runs
    twice, and the second counts: the first finds in the caches what the one before it left there.
    """
    rounds = []
    for _ in range(_NUM_ROUNDS):
        seconds = {}
        for name, run in runs.items():
            run()
            begin = time.perf_counter()
            run()
            seconds[name] = time.perf_counter() - begin
        rounds.append(seconds)
    rounds.sort(key=lambda seconds: sum(seconds.values()))
    quiet = rounds[: (_NUM_ROUNDS + 1) // 2]
    return lambda longer, shorter: median(seconds[longer] - seconds[shorter] for seconds in quiet)
