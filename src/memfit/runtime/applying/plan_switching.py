"""Runs each forward pass of a model by the plan for the sizes of its inputs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memfit.graph.inputs import Input, difference_in_words
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
    no plan is large enough for: it adds one, or raises. Modules stay wrapped; switching only changes what they call.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: SizePlans,
        runners_of: Callable[[int], Runners],
        plan_beyond: Callable[[tuple[Input, ...]], None] | None,
        owner: object,
    ) -> None:
        self.plans = plans
        # How many places beyond the one for its size a step takes its plan from, by that place.
        self._skipped: dict[int, int] = {}
        self._place_of_size: int | None = None
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
        """Let steps of the size of the last forward pass run by the next larger size's plan; whether there is one."""
        if self._place is None or self._place_of_size is None or self._place >= len(self.plans.entries) - 1:
            return False
        self._skipped[self._place_of_size] = self._place + 1 - self._place_of_size
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
        self._place_of_size = None
        inputs = inputs_of(forward, args, kwargs)
        place = self.plans.place_for(inputs)
        last = len(self.plans.entries) - 1
        if place is None and not self.plans.is_of_their_form(inputs):
            if not self._is_other_form_warned:
                self._is_other_form_warned = True
                difference = difference_in_words(self.plans.largest.plan.inputs, inputs)
                warnings.warn(
                    f"{difference}: these inputs differ from those that were planned for in more than sizes, so the "
                    "step runs by the plan for the largest size. Gradients are right, the predicted peak may not hold",
                    stacklevel=4,
                )
            return last
        if place is None:
            if self._plan_beyond is None:
                return last
            self._plan_beyond(inputs)
            self.forget_plans()
            place = self.plans.place_for(inputs)
            last = len(self.plans.entries) - 1
            if place is None:
                return last
        self._place_of_size = place
        return min(place + self._skipped.get(place, 0), last)

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
