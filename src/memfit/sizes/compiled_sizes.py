"""``fit(batches=..., compile=True)``: compiled blocks for batches of several sizes.

Each of the given batches is fitted by itself. A step runs by the plan of the smallest of them that is at least as large
in every dimension: what blocks save is chosen by it, while one graph with dynamic shapes serves all sizes, so that a
new size compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from memfit.capture.step_arguments import StepArguments
from memfit.distributed.wrapped_models import bare_model
from memfit.fitted import Fitted
from memfit.graph.inputs import growth_in_words
from memfit.graph.plan import Plan
from memfit.runtime.applying.forward_wrapping import Forward, wrap_forward
from memfit.runtime.applying.model_inputs import inputs_of
from memfit.sizes.batch_form import BatchForm
from memfit.units import format_bytes

FitOne = Callable[[StepArguments, bool | Literal["auto"]], Fitted]


def fit_compiled_by_size(
    model: nn.Module, form: BatchForm, compile: bool | Literal["auto"], fit_one: FitOne
) -> CompiledFittedBySize | None:
    """Return plans with compiled blocks for the sizes of a form's batches; ``fit_one`` fits a single one.

    None where the largest batch runs in eager: because that is faster, or because no block can be compiled.
    """
    *smaller, given = form.arguments
    largest = fit_one(given, compile)
    largest.remove()
    if largest.plan.compiled is None:
        return None
    plans = []
    for each in smaller:
        fitted = fit_one(each, True)
        fitted.remove()
        plans.append(fitted.plan)
    return CompiledFittedBySize(model, [*plans, largest.plan], largest)


class CompiledFittedBySize(Fitted):
    """Plans with compiled blocks for batches of several sizes, applied to a model.

    ``plan``, ``profile`` and ``verification`` are those of the largest size; ``plans`` are those of all, ascending.
    """

    def __init__(self, model: nn.Module, plans: Sequence[Plan], largest: Fitted) -> None:
        super().__init__(model, largest.plan, largest.profile, largest.verification)
        self.plans = (*(plan for plan in plans[:-1] if _runs_with(plan, largest.plan)), largest.plan)
        self._used = largest.plan
        assert self._unwrap is not None
        self._unwrap.append(wrap_forward(bare_model(model), self._run_by_size, self))

    def _run_by_size(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            inputs = inputs_of(forward, args, kwargs)
            plan = next((plan for plan in self.plans if growth_in_words(plan.inputs, inputs) is None), self.plan)
            if plan is not self._used:
                assert plan.compiled is not None
                self._use_partitions(plan.compiled.partitions(), plan.compiled.offloaded)
                self._used = plan
        return forward(*args, **kwargs)

    def __repr__(self) -> str:
        lines = [f"Fitted: {type(self.model).__name__}, {len(self.plans)} plans with compiled blocks by size"]
        for plan in self.plans:
            words = "" if plan.compiled is None else f": {plan.compiled.in_words()}"
            lines.append(f"  {format_bytes(plan.predicted_peak_bytes)}{words}")
        return "\n".join([*lines, repr(self.verification)])


def _runs_with(plan: Plan, largest: Plan) -> bool:
    """Return whether blocks can run by ``plan`` while the rest runs by that for the largest size."""
    return (
        plan.compiled is not None
        and largest.compiled is not None
        and plan.compiled.choice.keys() == largest.compiled.choice.keys()
        and plan.chunks_loss == largest.chunks_loss
        and set(plan.recorded_modules) <= set(largest.recorded_modules)
    )
