"""Plans that offload, made by hand: what the planner would never choose for models this small."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from tests.engine.plans import dropping_all
from torch import nn

import memfit
from memfit.graph.names import parse_value_name
from memfit.graph.plan import Decision
from memfit.runtime.engine.offloading import HostCopies, OffloadedCopy
from memfit.runtime.native.native_build import native_module

NOTHING, SOME, EVERYTHING = 0, 5_000, 2**40
WINDOWS = (NOTHING, SOME, EVERYTHING)


def plan_with(profile: memfit.ModelProfile, decide: Callable[[str], Decision], window_bytes: int) -> memfit.Plan:
    """Return the plan that does with each value of the step what ``decide`` says of its name, recording everywhere.

    Values that did not come back in trials are saved: a kernel that nobody hears may write them after they left.
    """
    plan = dropping_all(profile)
    decisions = {name: decide(name) if before == "recompute" else before for name, before in plan.decisions.items()}
    return replace(plan, decisions=decisions, recorded_modules=("",), hooked_modules=("",), window_bytes=window_bytes)


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


class NotedCopies:
    """The copies that either engine has made since. They live as long as somebody wants them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._native = native_module()
        self._in_python: list[weakref.ref[OffloadedCopy]] = []
        self._num_alive_before = self._num_alive_in_cpp()
        self.clear()
        send = HostCopies.send

        def noting(offloading: HostCopies, *args: Any) -> OffloadedCopy | None:
            copy = send(offloading, *args)
            if copy is not None:
                self._in_python.append(weakref.ref(copy))
            return copy

        monkeypatch.setattr(HostCopies, "send", noting)

    def __len__(self) -> int:
        return len(self._in_python) + self._num_made_in_cpp() - self._num_made_before

    @property
    def num_alive(self) -> int:
        """How many of them there still are."""
        alive = [copy for reference in self._in_python if (copy := reference()) is not None]
        return len(alive) + self._num_alive_in_cpp() - self._num_alive_before

    def clear(self) -> None:
        """Forget those that were made so far; none of them may be alive."""
        assert self.num_alive == 0
        self._in_python.clear()
        self._num_made_before = self._num_made_in_cpp()

    def _num_made_in_cpp(self) -> int:
        return 0 if self._native is None else int(self._native.num_copies_made())

    def _num_alive_in_cpp(self) -> int:
        return 0 if self._native is None else int(self._native.num_copies_alive())
