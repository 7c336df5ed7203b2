"""Costs of ops: measured in place while a step runs; estimated from those that were where time ran out."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from memfit.capture.measuring.clocks import Call, Clock
from memfit.capture.measuring.roofline import Roofline
from memfit.capture.recording.op_facts import signature_of
from memfit.capture.recording.step_recording import OpFacts
from memfit.graph.model_profile import RecordedOp
from memfit.runtime.engine.interception import OpInterceptor
from memfit.runtime.engine.op_rules import OpRule, Treatment, is_random, rule_for

_MAX_OWN_RUNS = 9


class Cost(NamedTuple):
    """What an op costs: its seconds, None where it was not timed, and the most bytes it held beyond its results."""

    seconds: float | None
    workspace_bytes: int = 0


class OpMeter(OpInterceptor):
    """Measures the ops of a step while it runs, on the tensors that they come with.

    Each kind of op is tried several times before it first runs in the step; the results of trials are freed
    immediately, so that the step needs no more memory than without. Ops that write or draw random numbers run once, as
    in any step, and these runs are timed. Once ``timing_seconds`` are spent, nothing more is timed. Workspaces are
    measured in every run of the step's own, because they decide whether a budget is kept.
    """

    def __init__(self, clock: Clock, timing_seconds: float) -> None:
        super().__init__()
        self._clock = clock
        self._seconds_left = timing_seconds
        self._tried: dict[Any, float] = {}
        self._own_runs: dict[Any, list[float]] = {}
        self._workspace_bytes: dict[Any, int] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = rule_for(op)
        if types or rule.treatment is Treatment.VIEW:
            return op(*args, **kwargs)
        signature = signature_of(rule, args, kwargs)
        own_run: Call = functools.partial(op, *args, **kwargs)
        if self._seconds_left > 0:
            begin = time.perf_counter()
            own_run = self._timing(own_run, op, rule, args, kwargs, signature)
            self._seconds_left -= time.perf_counter() - begin
        result, workspace_bytes = self._clock.run_weighed(own_run)
        self._workspace_bytes[signature] = max(workspace_bytes, self._workspace_bytes.get(signature, 0))
        return result

    def _timing(self, own_run: Call, op: Any, rule: OpRule, args: Any, kwargs: Any, signature: Any) -> Call:
        """Try the op if it may be tried and has not been; return its own run, timed where it may not."""
        if rule.treatment is Treatment.PURE and not is_random(rule, args):
            if signature not in self._tried:
                trial_args = _without_statistics(rule, args)
                self._tried[signature] = self._clock.seconds_of(lambda: op(*trial_args, **kwargs))
            return own_run
        own_seconds = self._own_runs.setdefault(signature, [])
        if len(own_seconds) >= _MAX_OWN_RUNS:
            return own_run

        def timed_run() -> object:
            result, seconds = self._clock.run_timed(own_run)
            own_seconds.append(seconds)
            self._seconds_left -= seconds
            return result

        return timed_run

    def costs(self) -> dict[Any, Cost]:
        """Return what was measured, by signature."""
        seconds = self._tried | {signature: median(runs) for signature, runs in self._own_runs.items() if runs}
        return {
            signature: Cost(seconds.get(signature), self._workspace_bytes.get(signature, 0))
            for signature in {**seconds, **self._workspace_bytes}
        }


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
    costs = [cost_of.get(fact.signature, Cost(None)) for fact in facts]
    timed = [(fact, cost.seconds) for fact, cost in zip(facts, costs, strict=True) if cost.seconds is not None]
    roofline = Roofline.of_measured(timed) or Roofline.of_device(device)
    return tuple(
        replace(
            op,
            seconds=roofline.seconds_of(fact) if cost.seconds is None else cost.seconds,
            workspace_bytes=cost.workspace_bytes,
        )
        for op, fact, cost in zip(ops, facts, costs, strict=True)
    )
