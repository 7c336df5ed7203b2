"""Which ops run in which modules in one forward pass, by which passes of different structure are told apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from memfit.capture.recording.module_scopes import ModuleScopes
from memfit.capture.training_step import TrainingStep
from memfit.distributed.wrapped_models import bare_model
from memfit.runtime.engine.interception import OpInterceptor
from memfit.runtime.engine.op_rules import Treatment, rule_for


class Structure(NamedTuple):
    """How often each op ran with gradients in each module, by module and op, and the modules that were called."""

    num_calls: Mapping[tuple[str, str], int]
    called: frozenset[str]

    @property
    def size(self) -> int:
        """How many ops ran."""
        return sum(self.num_calls.values())

    def varying_ops(self, other: Structure) -> set[tuple[str, str]]:
        """Return the ops, by module and op, whose number within one call of their module is another in ``other``."""
        both = self.called & other.called
        return {
            key
            for key in {**self.num_calls, **other.num_calls}
            if key[0] in both and self.num_calls.get(key, 0) != other.num_calls.get(key, 0)
        }

    def difference_from(self, other: Structure) -> str | None:
        """Return in words what differs most plainly from ``other``; None where nothing does."""
        for more, less in ((self, other), (other, self)):
            missing = sorted(more.called - less.called, key=lambda path: (path.count("."), path))
            if missing:
                return f"{missing[0]} is called in some runs and skipped in others"
        counts = {**self.num_calls, **other.num_calls}
        for module, op in counts:
            numbers = sorted({self.num_calls.get((module, op), 0), other.num_calls.get((module, op), 0)})
            if len(numbers) > 1:
                return f"{op} runs {numbers[0]} times in {module or 'the model itself'}, or {numbers[1]} times"
        return None


def structure_of_run(step: TrainingStep) -> Structure:
    """Run the forward pass of ``step``, or all of a step function, and return its structure."""
    scopes = ModuleScopes()
    counter = _OpCounter(scopes)
    with scopes.save_hooks(bare_model(step.model)), counter:
        if step.arguments.step is None:
            step.run_forward()
        else:
            step.run_forward_and_backward()
    return Structure(counter.num_calls, frozenset(scopes.seen))


class _OpCounter(OpInterceptor):
    def __init__(self, scopes: ModuleScopes) -> None:
        super().__init__()
        self.num_calls: Counter[tuple[str, str]] = Counter()
        self._scopes = scopes

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        module = self._scopes.current
        if module is not None and self._scopes.is_in_forward and not types and torch.is_grad_enabled():
            rule = rule_for(op)
            if rule.treatment is not Treatment.VIEW:
                self.num_calls[module, rule.name] += 1
        return op(*args, **(kwargs or {}))
