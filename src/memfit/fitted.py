"""What ``fit`` returns: the plan on its model, with what it came from and the proof that it holds."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit.capture.state.random_states import RandomStates
from memfit.errors import InfeasibleBudgetError
from memfit.graph.inputs import Input
from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import Plan
from memfit.graph.size_plans import SizePlans
from memfit.graph.summaries import html_summary
from memfit.graph.verification import Verification
from memfit.planning.planner import plan as plan_step
from memfit.runtime.allocation_meter import out_of_memory_on_cpu
from memfit.runtime.applying.apply import Applied, AppliedBySize
from memfit.runtime.engine.native_tape import new_tape
from memfit.units import format_bytes

# A plan that ran out of memory is followed by one for this share of its peak.
_NEXT_PEAK_SHARE = 0.9


class Fitted(Applied):
    """A plan applied to a model, with what it came from and the proof that it holds.

    ``num_retries`` counts the steps that `run` had to repeat with a smaller plan.
    """

    def __init__(self, model: nn.Module, plan: Plan, profile: ModelProfile, verification: Verification) -> None:
        super().__init__(model, plan, new_tape)
        self.profile = profile
        self.verification = verification
        self.num_retries = 0

    def run(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Return ``step(batch)``; repeat it with a smaller plan where it runs out of memory all the same.

        Before it is repeated, random number generators, buffers and gradients are put back as they were, so that the
        step that succeeds is the only one that counts. A step that has begun to change parameters cannot be repeated,
        and raises. Existing gradients are copied to host memory before each step, which takes time where they are kept
        from step to step.
        """
        while True:
            start = _StepStart(self.model)
            try:
                with out_of_memory_on_cpu():
                    return step(batch)
            except torch.OutOfMemoryError as error:
                if not start.can_be_restored():
                    raise
                message = str(error)
            # Outside of the handler, because an error that is being handled keeps alive what the failed step had made.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            start.restore()
            self._use_smaller_plan(message)
            self.num_retries += 1

    def _use_smaller_plan(self, message: str) -> None:
        """Apply the next smaller plan from now on, or raise where there is none."""
        plan = _next_smaller(self.plan, self.profile, message)
        self.remove()
        super().__init__(self.model, plan, new_tape)
        _warn_of_smaller_plan(plan)

    def __repr__(self) -> str:
        return f"Fitted: {type(self.model).__name__}\n{self.verification!r}"

    def _repr_html_(self) -> str:
        return html_summary(f"Fitted: {type(self.model).__name__}", self.verification.summary_lines())


class FittedBySize(AppliedBySize, Fitted):
    """Plans for batches of many sizes, applied to a model.

    ``plan``, ``profile`` and ``verification`` are those of the largest size; ``plans`` has the plan for each size.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: SizePlans,
        profile: ModelProfile,
        verification: Verification,
        plan_beyond: Callable[[tuple[Input, ...]], str | None] | None,
    ) -> None:
        AppliedBySize.__init__(self, model, plans, plan_beyond)
        self.profile = profile
        self.verification = verification
        self.num_retries = 0

    def _use_smaller_plan(self, message: str) -> None:
        if self._switch.skip_plan():
            _warn_of_smaller_plan(None)
            return
        place = self._switch.place
        current = self.plans.entries[place].plan
        plan = replace(_next_smaller(current, self.profile, message), inputs=current.inputs)
        self.plans.replace_plan(place, plan)
        self.plan = self.plans.largest.plan
        self._switch.forget_plans()
        _warn_of_smaller_plan(plan)

    def __repr__(self) -> str:
        entries = self.plans.entries
        largest = self.plans.largest.size_in_words
        lines = [f"Fitted: {type(self.model).__name__}, {len(entries)} plans for sizes up to {largest}"]
        lines += [f"  up to {entry.size_in_words}: {_plan_in_words(entry.plan)}" for entry in entries]
        return "\n".join([*lines, repr(self.verification)])

    def _repr_html_(self) -> str:
        sizes = {f"up to {entry.size_in_words}": _plan_in_words(entry.plan) for entry in self.plans.entries}
        return html_summary(f"Fitted: {type(self.model).__name__}", sizes | self.verification.summary_lines())


def _plan_in_words(plan: Plan) -> str:
    return f"{format_bytes(plan.predicted_peak_bytes)}, {plan.predicted_overhead:+.1%} time"


def _next_smaller(plan: Plan, profile: ModelProfile, message: str) -> Plan:
    try:
        smaller = plan_step(profile, budget=int(_NEXT_PEAK_SHARE * plan.predicted_peak_bytes))
    except InfeasibleBudgetError:
        raise torch.OutOfMemoryError(
            f"{message}\nThe step ran out of memory by the smallest plan that there is (predicted peak "
            f"{format_bytes(plan.predicted_peak_bytes)}); random number generators, buffers and gradients are as "
            "before it. Make the batch smaller"
        ) from None
    return replace(smaller, budget_bytes=plan.budget_bytes)


def _warn_of_smaller_plan(plan: Plan | None) -> None:
    words = "the plan of a larger size" if plan is None else format_bytes(plan.predicted_peak_bytes)
    warnings.warn(
        f"a step ran out of memory and is repeated by a smaller plan ({words}), which later steps run by, too",
        stacklevel=4,
    )


class _StepStart:
    """What a step that fails half-way leaves changed: random number generators, buffers and gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._versions = [parameter._version for parameter in self._parameters]
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._copies = [None if grad is None else grad.detach().to("cpu", copy=True) for grad in self._gradients]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._random_states = RandomStates()

    def can_be_restored(self) -> bool:
        """Return whether the step has left the parameters alone so far."""
        return self._versions == [parameter._version for parameter in self._parameters]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for parameter, gradient, copied in zip(self._parameters, self._gradients, self._copies, strict=True):
                parameter.grad = gradient
                if gradient is not None and copied is not None:
                    gradient.copy_(copied)
            for buffer, copied in self._buffers:
                buffer.copy_(copied)
        self._random_states.restore()
