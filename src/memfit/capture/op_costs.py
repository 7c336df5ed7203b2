"""Costs of ops: measured in place while a step runs; estimated from those that were where time ran out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from memfit.capture.clocks import Clock, Cost
from memfit.capture.op_facts import signature_of
from memfit.capture.recording import OpFacts
from memfit.capture.roofline import Roofline
from memfit.graph.model_profile import RecordedOp
from memfit.runtime.op_rules import OpRule, Treatment, is_random, rule_for
from memfit.runtime.torch_internals import DispatchMode

_MAX_OWN_RUNS = 9


class OpTimer(DispatchMode):
    """Times the ops of a step while it runs, on the tensors that they come with.

    Each kind of op is tried several times when it first comes by, before it runs for good; the results of trials are
    dropped at once, so that the step needs no more memory than without. Ops that write or draw random numbers run once,
    as ever, and their own runs are timed. Once ``budget_seconds`` are spent, nothing more is.
    """

    def __init__(self, clock: Clock, budget_seconds: float) -> None:
        super().__init__()
        self._clock = clock
        self._seconds_left = budget_seconds
        self._tried: dict[Any, Cost] = {}
        self._own_runs: dict[Any, list[float]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = rule_for(op)
        if self._seconds_left <= 0 or types or rule.treatment is Treatment.VIEW:
            return op(*args, **kwargs)
        begin = time.perf_counter()
        signature = signature_of(rule, args, kwargs)
        if rule.treatment is Treatment.PURE and not is_random(rule, args):
            if signature not in self._tried:
                trial_args = _without_statistics(rule, args)
                self._tried[signature] = self._clock.cost_of(lambda: op(*trial_args, **kwargs))
                self._seconds_left -= time.perf_counter() - begin
            return op(*args, **kwargs)
        own_runs = self._own_runs.setdefault(signature, [])
        if len(own_runs) >= _MAX_OWN_RUNS:
            return op(*args, **kwargs)
        result, seconds = self._clock.run_once(lambda: op(*args, **kwargs))
        own_runs.append(seconds)
        self._seconds_left -= time.perf_counter() - begin
        return result

    def costs(self) -> dict[Any, Cost]:
        """Return what was measured, by signature."""
        return self._tried | {signature: Cost(median(runs)) for signature, runs in self._own_runs.items()}


def _without_statistics(rule: OpRule, args: Any) -> Any:
    """Return the arguments without the running statistics that a batch norm would update."""
    if rule.batch_norm_arguments is None:
        return args
    mean, variance, training = rule.batch_norm_arguments
    return [None if args[training] and place in (mean, variance) else arg for place, arg in enumerate(args)]


def with_costs(
    ops: Sequence[RecordedOp], facts: Sequence[OpFacts], cost_of: dict[Any, Cost], device: torch.device
) -> tuple[RecordedOp, ...]:
    """Return ``ops`` with seconds and workspaces: as measured, or as the measured ones suggest."""
    measured = [(fact, cost_of[fact.signature]) for fact in facts if fact.signature in cost_of]
    roofline = Roofline.of_measured((fact, cost.seconds) for fact, cost in measured) or Roofline.of_device(device)
    return tuple(
        replace(op, seconds=cost.seconds, workspace_bytes=cost.workspace_bytes)
        for op, fact in zip(ops, facts, strict=True)
        for cost in [cost_of.get(fact.signature) or Cost(roofline.seconds_of(fact))]
    )
