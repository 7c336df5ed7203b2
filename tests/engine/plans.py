"""The plans that the zoo's models are run with, from whole layers to single ops. Profiles are made once a session."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from functools import cache

import pytest
from tests.engine.zoo import Example
from torch import nn

import memfit
from memfit.calibration.calibrating import UNACCOUNTED
from memfit.planning.planner import plan_recomputing
from memfit.runtime.native import native_library

# Tests with the engine in Python replace it.
_MODULE_IN_CPP = native_library.configured_module

# Ops that cost little beside a matrix product: the first ones that a planner would recompute.
CHEAP_OPS = (
    "aten.add",
    "aten.cos",
    "aten.div",
    "aten.exp",
    "aten.gelu",
    "aten.leaky_relu",
    "aten.masked_fill",
    "aten.mul",
    "aten.native_batch_norm",
    "aten.native_group_norm",
    "aten.native_layer_norm",
    "aten.relu",
    "aten.sigmoid",
    "aten.silu",
    "aten.sin",
    "aten._softmax",
    "aten.tanh",
    "aten._to_copy",
    "aten.where",
)


@cache
def profile_of(example: Example) -> memfit.ModelProfile:
    """Return the profile of one training step of ``example``, always recorded with the engine in C++.

    Plans of it must be right with the engine in Python too, where torch runs a few other ops.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "configured_module", _MODULE_IN_CPP)
        return new_profile_of(example)


def new_profile_of(example: Example) -> memfit.ModelProfile:
    """Return a profile recorded with the engine that runs now, whose ops those of a planned step are."""
    model, batch, loss = example.build()
    with example.context():
        return memfit.profile(model, batch, loss=loss)


def unaccounted_bytes(profile: memfit.ModelProfile) -> int:
    """Return the bytes at the measured peak that no op accounts for, such as numbers that autograd saves."""
    return sum(value.num_bytes for value in profile.values if value.name == UNACCOUNTED)


def every_layer(example: Example) -> memfit.Plan:
    """Recompute every block from its inputs."""
    return memfit.plan(profile_of(example), strategy=memfit.Full())


def every_second_layer(example: Example) -> memfit.Plan:
    """Recompute the first block, the third, and so on."""
    return memfit.plan(profile_of(example), strategy=memfit.EveryNthLayer(2))


def every_value(example: Example) -> memfit.Plan:
    """Recompute everything that can be replayed, down to the model's inputs and weights."""
    return dropping_all(profile_of(example))


def dropping(profile: memfit.ModelProfile, pattern: str) -> memfit.Plan:
    """Drop the values of these names that can be replayed, also those that no replay needs, which no planner would."""
    return plan_recomputing(
        profile, lambda step: {index for index in step.plannable if fnmatch(profile.values[index].name, pattern)}
    )


def dropping_all(profile: memfit.ModelProfile) -> memfit.Plan:
    """Drop everything that can be replayed."""
    return dropping(profile, "*")


def cheap_ops(example: Example) -> memfit.Plan:
    """Recompute the cheap ops that the model has and that can be replayed, from whatever else is saved."""
    decisions = every_value(example).decisions
    ops = {name.rpartition("::")[2].partition("#")[0] for name, what in decisions.items() if what == "recompute"}
    selectors = [f"*::{op}" for op in CHEAP_OPS if op in ops]
    return memfit.plan(profile_of(example), strategy=memfit.NoCheckpointing(), force_recompute=selectors)


def applied(model: nn.Module, plan: memfit.Plan) -> memfit.Applied:
    """Apply ``plan``; one that drops nothing must say so."""
    if "recompute" in plan.decisions.values():
        return memfit.apply(model, plan)
    with pytest.warns(UserWarning, match="nothing will change"):
        return memfit.apply(model, plan)


PlanFor = Callable[[Example], memfit.Plan]
LAYER_PLANS: tuple[PlanFor, ...] = (every_layer, every_second_layer)
VALUE_PLANS: tuple[PlanFor, ...] = (every_value, cheap_ops)


def plans_for(example: Example) -> tuple[PlanFor, ...]:
    """Return the plans that change something: layers can be chosen only where blocks repeat."""
    return LAYER_PLANS + VALUE_PLANS if example.has_blocks else VALUE_PLANS
