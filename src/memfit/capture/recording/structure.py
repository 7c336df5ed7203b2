"""Which ops run in which modules in one run of a step, by which runs of different structure are distinguished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from memfit.capture.recording.module_scopes import ModuleScopes
from memfit.capture.recording.recorded_runs import no_garbage_collection
from memfit.capture.training_step import TrainingStep
from memfit.distributed.wrapped_models import bare_model
from memfit.runtime.allocation_meter import allocated_peak
from memfit.runtime.engine.interception import OpInterceptor
from memfit.runtime.engine.op_rules import Treatment, rule_for
from memfit.units import format_bytes

# Peaks of equal ops that differ by more come from tensors of other sizes. Routing to experts makes up for less.
_SAME_PEAK = 0.05
RunOp = Callable[[Any, Any, Any, Any], Any]


class Structure(NamedTuple):
    """How often each op ran with gradients in each module, by module and op, and how often modules were called.

    ``peak_bytes`` is the most that the run allocated.
    """

    num_calls: Mapping[tuple[str, str], int]
    module_calls: Mapping[str, int]
    peak_bytes: int

    @property
    def called(self) -> frozenset[str]:
        """The modules that were called."""
        return frozenset(self.module_calls)

    def varying_ops(self, other: Structure) -> set[tuple[str, str]]:
        """Return the ops, by module and op, whose number within one call of their module is another in ``other``."""
        both = self.called & other.called
        return {
            key
            for key in {**self.num_calls, **other.num_calls}
            if key[0] in both
            and self.num_calls.get(key, 0) * other.module_calls[key[0]]
            != other.num_calls.get(key, 0) * self.module_calls[key[0]]
        }

    def difference_from(self, other: Structure) -> str | None:
        """Return in words what differs most plainly from ``other``; None where nothing does."""
        for more, less in ((self, other), (other, self)):
            missing = sorted(more.called - less.called, key=lambda path: (path.count("."), path))
            if missing:
                return f"{missing[0]} is called in some runs and skipped in others"
        for module, op in {**self.num_calls, **other.num_calls}:
            fewer, more_often = sorted((self.num_calls.get((module, op), 0), other.num_calls.get((module, op), 0)))
            if fewer < more_often:
                return f"{op} runs {fewer} times in {module or 'the model itself'}, or {more_often} times"
        smaller, larger = sorted((self.peak_bytes, other.peak_bytes))
        if larger > smaller * (1 + _SAME_PEAK):
            return f"the same ops take {format_bytes(smaller)} in some runs and {format_bytes(larger)} in others"
        return None


def structure_of_run(step: TrainingStep, device: torch.device, run_op: RunOp, *, whole: bool) -> Structure:
    """Run ``step``, only its forward pass where it has one and ``whole`` is not asked for; return its structure."""
    scopes = ModuleScopes()
    counter = _OpCounter(scopes, run_op)
    run = step.run if whole or step.arguments.step is not None else step.run_forward
    with scopes.tracking(bare_model(step.model)), no_garbage_collection(), counter:
        peak_bytes = allocated_peak(run, device)
    return Structure(counter.num_calls, dict(scopes.seen), peak_bytes)


class _OpCounter(OpInterceptor):
    def __init__(self, scopes: ModuleScopes, run_op: RunOp) -> None:
        super().__init__()
        self.num_calls: Counter[tuple[str, str]] = Counter()
        self._scopes = scopes
        self._run_op = run_op

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        module = self._scopes.current
        if module is not None and self._scopes.is_in_forward and not types and torch.is_grad_enabled():
            rule = rule_for(op)
            if rule.treatment is not Treatment.VIEW:
                self.num_calls[module, rule.name] += 1
        return self._run_op(op, types, args, kwargs or {})
