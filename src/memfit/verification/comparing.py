"""Measures several methods of running one step: peaks, gradients, and seconds in interleaved rounds."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import torch

from memfit.capture.training_step import TrainingStep
from memfit.graph.plan import Plan
from memfit.graph.verification import MethodResult, quartiles_of
from memfit.progress import Progress, Quiet
from memfit.runtime.applying.forward_wrapping import plans_set_aside
from memfit.verification.methods import Method, Planned, checkpointed, plain
from memfit.verification.trials import Measured, Trials

PLAIN, PLANNED, CHECKPOINTED = "plain step", "memfit", "torch: checkpoint every block"


def measure_methods(
    step: TrainingStep, methods: Mapping[str, Method], progress: Progress | None = None
) -> tuple[MethodResult, ...]:
    """Measure ``methods`` of running ``step`` in interleaved rounds, each run from the same state.

    Gradients and times are relative to the first method that runs. One that raises is reported with its error.
    """
    shown = Quiet() if progress is None else progress
    runs: dict[str, Measured] = {}
    errors: dict[str, str] = {}
    with plans_set_aside(step.model):
        trials = Trials(step)
        with trials.kept_optimizer():
            shown.stage("comparing methods", num_steps=len(methods))
            for label, method in methods.items():
                error = _try_method(trials, method, label, runs)
                if error is not None:
                    errors[label] = error
                shown.advance()
            timed = trials.interleaved_seconds([methods[label] for label in runs], shown) if runs else []
            seconds = dict(zip(runs, timed, strict=True))
    results = {label: _result(label, runs, seconds) for label in runs}
    return tuple(results.get(label) or MethodResult(label, error=errors[label]) for label in methods)


def compare(
    step: TrainingStep, plan: Plan, block_paths: tuple[str, ...], progress: Progress | None = None
) -> tuple[MethodResult, ...]:
    """Measure the plain step, ``plan``, and torch's checkpointing of the blocks at ``block_paths``."""
    methods: dict[str, Method] = {PLAIN: plain, PLANNED: Planned(plan), CHECKPOINTED: checkpointed(block_paths)}
    return measure_methods(step, methods, progress)


def _try_method(trials: Trials, method: Method, label: str, runs: dict[str, Measured]) -> str | None:
    """Run ``method`` twice, the second time measured; return why it failed, None where it did not."""
    try:
        trials.warm_up(method)
        reference = next(iter(runs.values())).gradients if runs else None
        runs[label] = trials.measured(method, reference)
    except torch.OutOfMemoryError:
        return "out of memory"
    # Checkpointing may fail on a model in ways of its own; the other methods are still worth comparing.
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _result(label: str, runs: Mapping[str, Measured], seconds: Mapping[str, list[float]]) -> MethodResult:
    first = next(iter(runs))
    own, base = seconds[label], seconds[first]
    return MethodResult(
        label=label,
        peak_bytes=runs[label].peak_bytes,
        step_seconds=median(own),
        overhead=median(own) / median(base) - 1,
        overhead_quartiles=quartiles_of([ours / theirs - 1 for ours, theirs in zip(own, base, strict=True)]),
        gradients_equal=not runs[label].difference.names,
    )
