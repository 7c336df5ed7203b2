"""Plans that offload, made by hand: what the planner would never choose for models this small."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import memfit
from memfit.graph.names import parse_value_name
from memfit.graph.plan import Decision
from memfit.runtime.offloading import OffloadedCopy, Offloading

NOTHING, SOME, EVERYTHING = 0, 5_000, 2**40
WINDOWS = (NOTHING, SOME, EVERYTHING)


def plan_with(profile: memfit.ModelProfile, decide: Callable[[str], Decision], window_bytes: int) -> memfit.Plan:
    """Return the plan that does with each value of the step what ``decide`` says of its name, listening everywhere.

    Values that did not come back in trials are saved: a kernel that nobody hears may write them after they left.
    """
    plan = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["*"])
    decisions = {name: decide(name) if before == "recompute" else before for name, before in plan.decisions.items()}
    return replace(plan, decisions=decisions, regions=("",), watched=("",), window_bytes=window_bytes)


def with_decisions(plan: memfit.Plan, decisions: dict[str, Decision]) -> memfit.Plan:
    """Return ``plan`` with other decisions, also on values that no planner would name."""
    return replace(plan, decisions={**plan.decisions, **decisions})


def mixed_plan(profile: memfit.ModelProfile, seed: int, window_bytes: int) -> memfit.Plan:
    """Return a plan that saves, recomputes and offloads values as they come."""
    draw = random.Random(seed)
    decisions = (Decision.SAVE, Decision.RECOMPUTE, Decision.OFFLOAD, Decision.OFFLOAD)
    return plan_with(profile, lambda _: draw.choice(decisions), window_bytes)


def plan_by_op(
    model: nn.Module,
    batch: Any,
    *,
    offload: Iterable[str] = (),
    recompute: Iterable[str] = (),
    window_bytes: int = 0,
    loss: Any = None,
) -> memfit.Plan:
    """Return the plan that offloads, or recomputes, whatever ops of these names make, and saves the rest."""
    of_op = dict.fromkeys(recompute, Decision.RECOMPUTE) | dict.fromkeys(offload, Decision.OFFLOAD)
    profile = memfit.profile(model, batch, loss=loss)
    names = {parse_value_name(name).op for name in memfit.plan(profile, strategy=memfit.NoCheckpointing()).decisions}
    assert names >= of_op.keys(), f"the model runs {sorted(names)}"
    return plan_with(profile, lambda name: of_op.get(parse_value_name(name).op, Decision.SAVE), window_bytes)


def noted_copies(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[OffloadedCopy]]:
    """Return the copies that are made from now on, as they are made. They live as long as somebody wants them."""
    copies: list[weakref.ref[OffloadedCopy]] = []
    send = Offloading.send

    def noting(self: Offloading, *args: Any) -> OffloadedCopy | None:
        copy = send(self, *args)
        if copy is not None:
            copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(Offloading, "send", noting)
    return copies
