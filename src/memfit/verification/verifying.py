"""``verify``: tries a plan against the plain step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from statistics import median
from typing import Any

import torch
from torch import nn

from memfit.capture.step_arguments import GradientsMode, Loss, StepArguments, StepFunction
from memfit.capture.training_step import TrainingStep
from memfit.environment import processor_name
from memfit.errors import InvalidParameterError, VerificationError
from memfit.graph.inputs import growth_in_words
from memfit.graph.plan import Plan
from memfit.graph.verification import Verification, quartiles_of, worst_of
from memfit.progress import Progress, Quiet
from memfit.runtime.allocation_meter import out_of_memory_on_cpu
from memfit.runtime.applying.forward_wrapping import plans_set_aside
from memfit.runtime.checks.pass_check import warn_of_calls, warn_of_larger_inputs
from memfit.runtime.chunked_loss.language_model_head import noting_type_of_logits
from memfit.units import format_bytes
from memfit.verification.methods import Method, Planned, compiled_reference, plain
from memfit.verification.trials import Trials


def verify(
    model: nn.Module,
    plan: Plan,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    targets: Any = None,
    step: StepFunction | None = None,
    optimizer: Any = None,
    gradients: GradientsMode = "fresh",
    progress: Progress | None = None,
) -> Verification:
    """Run the plain and the planned step interleaved, each from the same state, and report how they differ.

    The step arguments are as for `profile`; give the same, so that the peak is that of the step that was planned.
    Everything is left as it was, a plan included that is applied to the model already: it is set aside meanwhile, and
    ``plan`` is what is tried. A batch of other shapes than those planned for is warned of.
    """
    _refuse_unfit(model, plan)
    arguments = StepArguments(batch, loss, targets, step, optimizer, gradients)
    verification = verify_step(TrainingStep(model, arguments), plan, progress)
    if verification.not_as_planned is not None:
        warn_of_calls(verification.not_as_planned, stacklevel=2)
    return verification


def verify_step(step: TrainingStep, plan: Plan, progress: Progress | None = None) -> Verification:
    """Verify ``plan`` on ``step``."""
    shown = Quiet() if progress is None else progress
    with plans_set_aside(step.model):
        # Outside of the handlers, because an error that is being handled keeps alive what the failed step had made.
        with suppress(torch.OutOfMemoryError), out_of_memory_on_cpu():
            return _reduced(step, _compared(step, plan, shown))
        # Then the plan is the only way to run this model here, and it is still worth knowing that it does.
        with suppress(torch.OutOfMemoryError), out_of_memory_on_cpu():
            return _reduced(step, planned_alone(step, plan, shown))
    raise VerificationError(
        "the planned step does not fit the device, though its plan predicts a peak of "
        f"{format_bytes(plan.predicted_peak_bytes)}; plan for a smaller budget"
    )


def _reduced(step: TrainingStep, verification: Verification) -> Verification:
    """Return what holds for all processes; for this one where each has a model of its own, as a pipeline's stages."""
    verifications = step.ranks.gathered(verification)
    have_one_model = len({each.fingerprint for each in verifications}) == 1
    return worst_of(verifications) if have_one_model else verification


def faster_of(step: TrainingStep, plans: Sequence[Plan], progress: Progress) -> int:
    """Return the place of the plan whose steps take the least time, measured interleaved."""
    if len(plans) == 1:
        return 0
    with plans_set_aside(step.model):
        trials = Trials(step)
        methods = [Planned(plan) for plan in plans]
        with trials.kept_optimizer():
            for method in methods:
                trials.warm_up(method)
            medians = [median(seconds) for seconds in trials.interleaved_seconds(methods, progress)]
    return step.ranks.agreed(medians.index(min(medians)))


def _compared(step: TrainingStep, plan: Plan, progress: Progress) -> Verification:
    trials = Trials(step)
    with trials.kept_optimizer():
        progress.stage("comparing gradients and peaks", num_steps=5 if plan.compiled is None else 6)
        # Compiled code rounds otherwise than eager: its gradients are compared with its own.
        reference = plain if plan.compiled is None else compiled_reference(plan)
        types: list[torch.dtype] = []
        with noting_type_of_logits(step.model, types) if plan.chunks_loss and reference is plain else nullcontext():
            trials.warm_up(plain)
        progress.advance()
        by_plan = Planned(plan)
        methods: tuple[Method, ...] = (reference, by_plan)
        for method in methods:
            if method is not plain:
                trials.warm_up(method)
                progress.advance()
        of_reference = trials.measured(reference)
        progress.advance()
        of_plan = trials.measured(by_plan, of_reference.gradients)
        progress.advance()
        noise = trials.measured(reference, of_reference.gradients).difference
        progress.advance()
        plain_peak_bytes = of_reference.peak_bytes if reference is plain else trials.peak_bytes(plain)
        plain_seconds, seconds = trials.interleaved_seconds((plain, by_plan), progress)
    _warn_of_larger_inputs(plan, trials)
    num_gradients = sum(gradient is not None for gradient in of_reference.gradients.values())
    if not num_gradients:
        raise VerificationError(
            "no gradient was compared: after the plain step every gradient is None. Leave zero_grad() out of the step, "
            "or put it at its beginning; and check that the loss depends on parameters of the model that require "
            "gradients"
        )
    difference = of_plan.difference
    ratios = [ours / theirs - 1 for theirs, ours in zip(plain_seconds, seconds, strict=True)]
    return Verification(
        gradients_equal=not difference.names,
        num_gradients=num_gradients,
        max_gradient_error=difference.max_error,
        plain_reproducible=not noise.names,
        plain_gradient_error=noise.max_error,
        plain_gradient_distance=noise.distance,
        gradient_distance=difference.largest_distance if plan.chunks_loss or plan.compiled is not None else None,
        gradient_tolerance=_tolerance(plan, types),
        differing_parameters=difference.names,
        plain_peak_bytes=plain_peak_bytes,
        compared_with="plain step" if plan.compiled is None else "compiled step that saves everything",
        peak_bytes=of_plan.peak_bytes,
        plain_step_seconds=median(plain_seconds),
        plain_step_quartiles_seconds=quartiles_of(plain_seconds),
        overhead=median(seconds) / median(plain_seconds) - 1,
        overhead_quartiles=quartiles_of(ratios),
        **_planned_facts(plan, by_plan, seconds, trials),
    )


def _tolerance(plan: Plan, types_of_logits: Sequence[torch.dtype]) -> float | None:
    """Return how far gradients may be from those that they are compared with; None where bits must agree."""
    if plan.compiled is not None:
        return plan.compiled.gradient_tolerance
    return math.sqrt(torch.finfo(types_of_logits[0]).eps) if types_of_logits else None


def planned_alone(step: TrainingStep, plan: Plan, progress: Progress) -> Verification:
    """Return what was measured of the planned step alone, for steps that do not fit the device plain."""
    trials = Trials(step, plain_fits=False)
    with trials.kept_optimizer():
        progress.stage("measuring the peak", num_steps=2)
        by_plan = Planned(plan)
        trials.warm_up(by_plan)
        progress.advance()
        measured = trials.measured(by_plan)
        progress.advance()
        (seconds,) = trials.interleaved_seconds((by_plan,), progress)
    _warn_of_larger_inputs(plan, trials)
    return Verification(
        gradients_equal=None,
        num_gradients=0,
        max_gradient_error=None,
        plain_reproducible=None,
        plain_gradient_error=None,
        differing_parameters=(),
        plain_peak_bytes=None,
        peak_bytes=measured.peak_bytes,
        plain_step_seconds=None,
        plain_step_quartiles_seconds=None,
        overhead=None,
        overhead_quartiles=None,
        **_planned_facts(plan, by_plan, seconds, trials),
    )


def _planned_facts(plan: Plan, by_plan: Planned, seconds: Sequence[float], trials: Trials) -> dict[str, Any]:
    return {
        "not_as_planned": None if by_plan.unplanned is None else by_plan.unplanned.in_words(),
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "host_bytes": plan.host_bytes,
        "step_seconds": median(seconds),
        "step_quartiles_seconds": quartiles_of(seconds),
        "num_rounds": len(seconds),
        "device": str(trials.device),
        "device_name": _device_name(trials.device),
        "torch_version": torch.__version__,
        "fingerprint": plan.fingerprint,
    }


def _device_name(device: torch.device) -> str:
    """Return what ``device`` is called by its maker, and how many threads torch uses where it is the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        num_threads = torch.get_num_threads()
        return f"{processor_name()}, {num_threads} thread{'s' if num_threads > 1 else ''}"
    return str(device)


def _warn_of_larger_inputs(plan: Plan, trials: Trials) -> None:
    growth = growth_in_words(plan.inputs, trials.inputs) if plan.inputs else None
    if growth is not None:
        # At the caller of verify().
        warn_of_larger_inputs(growth, stacklevel=5)


def _refuse_unfit(model: object, plan: object) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidParameterError(f"model is a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(plan, Plan):
        raise InvalidParameterError(f"plan is a Plan as memfit.plan() returns it, got {type(plan).__name__}")
