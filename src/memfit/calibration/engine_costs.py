"""What the engine costs where the host is the device: on a CPU, each of its actions makes the step longer.

A property of the machine, not of the model: measured once, on a model whose ops take next to nothing, in seconds of the
thread, which do not count what other programs do meanwhile. The costs of single actions keep the ratios of
`USUAL_COSTS`, by which modules are chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from memfit.graph.model_profile import HOST_SECONDS, HostCosts
from memfit.graph.plan import Decision, Plan
from memfit.planning.step.recording import USUAL_COSTS
from memfit.runtime.applying.apply import Applied
from memfit.runtime.engine.native_tape import new_tape

_WIDTH = 4
_NUM_BLOCKS = 16
# A plan with few values, and one with all: their difference is what a value costs, the rest what a pass does.
_FEW, _ALL = 2, _NUM_BLOCKS
_NUM_ROUNDS, _STEPS_PER_ROUND = 24, 3
# What lies outside of these factors of the usual costs is a disturbance.
_SMALLEST_FACTOR, _LARGEST_FACTOR = 0.3, 30.0
# In the step of a model, whose ops displace the engine's code and data from the processor's caches, all of this takes
# so much longer: between 2 and 5 times on eight small models.
_COLD = 2.5
# For each value: a module is entered, an op recorded and its result dropped, a save hooked, and an op replayed.
_USUAL_SECONDS_OF_VALUE = (
    USUAL_COSTS.module_entry
    + USUAL_COSTS.recorded_op
    + USUAL_COSTS.dropped_op
    + USUAL_COSTS.hooked_save
    + USUAL_COSTS.replayed_op
)


@cache
def engine_costs_on_cpu(engine: str) -> HostCosts:
    """Return what ``engine``, the one in use, adds to steps in this thread; a plain step is launched for nothing."""
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        model, x = _model(), torch.ones(_WIDTH, _WIDTH, device="cpu", dtype=torch.float32)
        methods: list[Callable[[], AbstractContextManager[object]]] = [nullcontext]
        for num_values in (_FEW, _ALL):
            plan = _plan_dropping(num_values)
            methods.append(lambda plan=plan: Applied(model, plan, new_tape, warns_of_calls=False))  # type: ignore[misc]
        plain, few, most = _seconds_of_steps(methods, lambda: model(x).sum().backward())
        of_op = min(_seconds(lambda: torch.nn.functional.linear(x, x, x[0])) for _ in range(50))
    of_value = (most - few) / (_ALL - _FEW)
    factor = min(max((of_value - of_op) / _USUAL_SECONDS_OF_VALUE, _SMALLEST_FACTOR), _LARGEST_FACTOR)
    factor *= _COLD
    scaled = {name: factor * getattr(USUAL_COSTS, name) for name in HOST_SECONDS}
    return replace(USUAL_COSTS, **scaled, planned_pass=max(_COLD * (few - plain - _FEW * of_value), 0.0))


def _model() -> nn.Module:
    """Return a model whose weights are made without random numbers."""
    blocks = []
    for _ in range(_NUM_BLOCKS):
        linear = nn.utils.skip_init(nn.Linear, _WIDTH, _WIDTH, device="cpu", dtype=torch.float32)
        for parameter in linear.parameters():
            parameter.data.fill_(0.1)
        blocks.append(nn.Sequential(linear, nn.GELU()))
    return nn.Sequential(*blocks)


def _plan_dropping(num_values: int) -> Plan:
    """Return the plan that drops what the first linear layers make, which the GELU after each saves."""
    return Plan(
        decisions={f"{number}.0::aten.addmm#0": Decision.RECOMPUTE for number in range(num_values)},
        recorded_modules=tuple(f"{number}.0" for number in range(num_values)),
        hooked_modules=tuple(f"{number}.1" for number in range(num_values)),
        recompute_flops=0,
        fingerprint="",
    )


def _seconds_of_steps(
    methods: Sequence[Callable[[], AbstractContextManager[object]]], step: Callable[[], Tensor | None]
) -> list[float]:
    seconds: list[list[float]] = [[] for _ in methods]
    for _ in range(_NUM_ROUNDS):
        for method, of_method in zip(methods, seconds, strict=True):
            with method():
                step()
                of_method += [_seconds(step) for _ in range(_STEPS_PER_ROUND)]
    # The least of them: what disturbs a step of microseconds is as long as the step.
    return [min(each) for each in seconds]


def _seconds(call: Callable[[], object]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin
