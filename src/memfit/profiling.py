"""``profile``: describes one training step as data."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from memfit.calibration.calibrating import calibrated
from memfit.capture.fake_step import profile_of_fake_step
from memfit.capture.real_step import capture_real_step
from memfit.capture.state.kept_state import KeptState
from memfit.capture.step_arguments import refuse_unfit_arguments
from memfit.capture.training_step import Loss, TrainingStep
from memfit.errors import InvalidParameterError, MemfitError
from memfit.graph.model_profile import ModelProfile
from memfit.runtime.forward_wrapping import is_wrapped


def profile_of_real_step(step: TrainingStep) -> ModelProfile:
    """Return the profile of ``step``: captured in plain runs, then completed by trial runs with plans."""
    state = KeptState(step)
    with state.kept_optimizer():
        return calibrated(capture_real_step(step, state), step, state)


_PROFILE_OF_STEP = {"real": profile_of_real_step, "fake": profile_of_fake_step}


def profile(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    mode: Literal["real", "fake"] = "real",
) -> ModelProfile:
    """Measure one training step of ``model`` on ``batch`` and describe it as data.

    A tuple or list is passed as ``model(*batch)``, a dict as ``model(**batch)``, anything else as ``model(batch)``.
    ``loss(output)`` gives the scalar to differentiate; without it, the output's own loss, the output itself where it is
    a scalar, or the mean of its floating tensors. With an ``optimizer``, its step is part of the step. Everything is
    left as it was: weights, buffers, gradients, random number generators, the counters and caches that modules keep,
    and the optimizer's state.

    Where the plain step does not fit the device, ``mode="fake"`` runs it on fake tensors, which take no memory: sizes
    are as exact, times are estimates. ``ModelProfile.measured_with`` says which it was.
    """
    _refuse_unfit(model, mode)
    refuse_unfit_arguments(loss, optimizer)
    try:
        return _PROFILE_OF_STEP[mode](TrainingStep(model, batch, loss, optimizer))
    except torch.OutOfMemoryError as error:
        raise MemfitError(
            "the plain step does not fit the device, so that it cannot be measured there; profile(..., mode='fake') "
            f"needs no memory, or take a smaller batch ({error})"
        ) from error


def _refuse_unfit(model: object, mode: object) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidParameterError(f"model is a torch.nn.Module, got {type(model).__name__}")
    if mode not in _PROFILE_OF_STEP:
        raise InvalidParameterError(f"mode is 'real' or 'fake', got {mode!r}")
    if any(is_wrapped(module) for module in model.modules()):
        raise InvalidParameterError(
            f"a plan is at work on this {type(model).__name__} (or on a part of it); remove() it before profiling"
        )
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        raise InvalidParameterError(
            f"this {type(model).__name__} has lazy modules without parameters yet; run the model once before profiling"
        )
    if mode == "real" and any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InvalidParameterError(
            f"this {type(model).__name__} is on the meta device and cannot run; use mode='fake', or move it to a device"
        )
