"""Runs each forward pass of a model by the plan for the sizes of its inputs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memfit.graph.inputs import Input, difference_in_words, growth_in_words
from memfit.graph.size_plans import SizePlans
from memfit.runtime.applying.forward_wrapping import Forward, Runner, WrappedForward, wrap_forward
from memfit.runtime.applying.model_inputs import inputs_of
from memfit.runtime.checks.model_changes import ModelChanges
from memfit.runtime.torch_internals import refuses_saved_tensors_hooks

Runners = Mapping[str, Runner]
"""The wrapper of the forward of each module of a plan, by the module's path."""


class PlanSwitch:
    """Wraps a model, and runs its modules by the plan for the inputs of each forward pass.

    ``runners_of(place)`` are those of the plan at that place of ``plans``. ``plan_beyond`` is called with inputs that
    no plan is large enough for: it adds one, raises, or returns why there is none. Modules stay wrapped; switching only
    changes what they call.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: SizePlans,
        runners_of: Callable[[int], Runners],
        plan_beyond: Callable[[tuple[Input, ...]], str | None] | None,
        owner: object,
    ) -> None:
        self.plans = plans
        # How many of the plans for its size a step does not run by, by the place of the first.
        self._skipped: dict[int, int] = {}
        # Those of the plans for the last forward pass, the fastest first.
        self._places: tuple[int, ...] = ()
        # Inputs that no plan could be made for, and why.
        self._unplanned: dict[tuple[Input, ...], str] = {}
        self._modules = dict(model.named_modules())
        self._changes = ModelChanges(model)
        self._runners_of = runners_of
        self._plan_beyond = plan_beyond
        self._owner = owner
        self._wrapped: dict[str, WrappedForward] = {}
        self._unwrap: list[Callable[[], None]] = []
        self._in_thread = threading.local()
        self._runners: dict[int, Runners] = {}
        self._place: int | None = None
        self._root: Runner | None = None
        self._is_other_form_warned = False
        # The model last, so that its own wrapper is not among those that are switched.
        self._unwrap.append(wrap_forward(model, self._run, owner))

    @property
    def place(self) -> int:
        """The place of the plan that the last forward pass ran by; before any, of that for the largest size."""
        return self.plans.entries.index(self.plans.largest) if self._place is None else self._place

    def remove(self) -> None:
        """Restore the model."""
        while self._unwrap:
            self._unwrap.pop()()

    def forget_plans(self) -> None:
        """Look up all plans anew, because one was added."""
        self._runners.clear()
        self._skipped.clear()
        self._place = None

    def skip_plan(self) -> bool:
        """Let steps of the size of the last forward pass run by the next slower plan; return whether there is one."""
        if self._place is None or self._place == self._places[-1]:
            return False
        self._skipped[self._places[0]] = self._places.index(self._place) + 1
        return True

    def _run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or refuses_saved_tensors_hooks():
            return forward(*args, **kwargs)
        if getattr(self._in_thread, "is_inside", False):
            return self._run_by_plan(forward, args, kwargs)
        self._changes.see()
        self._switch_to(self._place_for(forward, args, kwargs))
        self._in_thread.is_inside = True
        try:
            return self._run_by_plan(forward, args, kwargs)
        finally:
            self._in_thread.is_inside = False

    def _run_by_plan(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(*args, **kwargs) if self._root is None else self._root(forward, args, kwargs)

    def _place_for(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        inputs = inputs_of(forward, args, kwargs)
        self._places = self.plans.places_for(inputs)
        if not self._places:
            self._places = self._places_beyond(inputs)
        return self._places[min(self._skipped.get(self._places[0], 0), len(self._places) - 1)]

    def _places_beyond(self, inputs: tuple[Input, ...]) -> tuple[int, ...]:
        """Return the places of plans for inputs that none is large enough for; where there is none, the largest's."""
        if self.plans.is_of_their_form(inputs):
            reason = self._unplanned.get(inputs)
            if reason is None:
                reason = "" if self._plan_beyond is None else self._plan_beyond(inputs)
                self.forget_plans()
                places = self.plans.places_for(inputs)
                if places:
                    return places
                self._unplanned[inputs] = reason or ""
                growth = growth_in_words(self.plans.largest.plan.inputs, inputs)
                warnings.warn(
                    f"{growth}, for which no plan can be made{f' ({reason})' if reason else ''}: the step runs by the "
                    "plan for the largest size. Gradients are right, the budget may not hold",
                    stacklevel=5,
                )
        elif not self._is_other_form_warned:
            self._is_other_form_warned = True
            difference = difference_in_words(self.plans.largest.plan.inputs, inputs)
            warnings.warn(
                f"{difference}: these inputs differ from those that were planned for in more than sizes, so the step "
                "runs by the plan for the largest size. Gradients are right, the predicted peak may not hold",
                stacklevel=5,
            )
        return (self.plans.entries.index(self.plans.largest),)

    def _switch_to(self, place: int) -> None:
        if place == self._place:
            return
        if place not in self._runners:
            self._runners[place] = self._runners_of(place)
        runners = self._runners[place]
        for path in runners:
            if path and path not in self._wrapped:
                self._unwrap.append(wrap_forward(self._modules[path], _run_plain, self._owner))
                wrapped = vars(self._modules[path])["forward"]
                assert isinstance(wrapped, WrappedForward)
                self._wrapped[path] = wrapped
        for path, wrapped in self._wrapped.items():
            wrapped.runner = runners.get(path, _run_plain)
        self._root = runners.get("")
        self._place = place


def _run_plain(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)
