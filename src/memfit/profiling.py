"""``profile``: describes one training step as data."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from memfit.calibration.calibrating import calibrated
from memfit.capture.fake_step import profile_of_fake_step
from memfit.capture.real_step import capture_real_step
from memfit.capture.state.kept_state import KeptState
from memfit.capture.step_arguments import GradientsMode, Loss, StepArguments, StepFunction
from memfit.capture.training_step import TrainingStep
from memfit.distributed.wrapped_models import refuse_fsdp1
from memfit.errors import InvalidParameterError, MemfitError
from memfit.graph.compiled_data.compiled_blocks import CompiledProfile
from memfit.graph.model_profile import ModelProfile
from memfit.progress import Progress, Quiet, progress_on_terminal
from memfit.runtime.allocation_meter import out_of_memory_on_cpu
from memfit.runtime.applying.forward_wrapping import plans_set_aside
from memfit.runtime.checks.model_changes import refuse_compiled_as_a_whole, warn_of_checkpointing
from memfit.runtime.chunked_loss.language_model_head import loss_in_chunks
from memfit.runtime.native.native_build import build_engine, is_built

ProfileMode = Literal["real", "fake"]


def profile_of_real_step(step: TrainingStep) -> ModelProfile:
    """Return the profile of ``step``: captured in plain runs, then completed by trial runs with plans."""
    state = KeptState(step)
    with state.kept_optimizer():
        captured = capture_real_step(step, state)
        profile = captured.profile
        # All processes go on with the profile of the fullest one, so that all try, plan and decide the same.
        fullest = step.ranks.largest(profile, profile.peak_bytes)
        captured = captured._replace(profile=replace(fullest, device=profile.device))
        completed = step.ranks.of_model(calibrated(captured, step, state))
        return replace(completed, device=profile.device)


def with_compiled_blocks(
    profile: ModelProfile,
    step: TrainingStep,
    progress: Progress | None = None,
    *,
    chunk_loss: bool = False,
    num_cuts: int = 5,
    of_same_blocks: CompiledProfile | None = None,
) -> ModelProfile:
    """Return ``profile`` of ``step`` with what was measured of compiled blocks; with ``chunk_loss``, beside that.

    ``of_same_blocks`` describes a step in which the same blocks run, whose partitions are taken. ``num_cuts`` is how
    many partitions of each kind of block are tried besides torch's own: each takes seconds to compile, and mixtures of
    a few are within a few percent of mixtures of many.
    """
    # Importing torch's compiler takes seconds.
    from memfit.compiled.compiled_steps import profile_of_compiled_step

    shown = progress or Quiet()
    state = KeptState(step)
    with plans_set_aside(step.model), state.kept_optimizer():
        with loss_in_chunks(step.model) if chunk_loss else nullcontext() as lazy_head:
            compiled = profile_of_compiled_step(step, state, shown, num_cuts, profile, of_same_blocks)
        return replace(profile, compiled=compiled, chunks_loss=lazy_head is not None and lazy_head.has_chunked)


_PROFILE_OF_STEP = {"real": profile_of_real_step, "fake": profile_of_fake_step}


def profile(
    model: nn.Module,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    targets: Any = None,
    step: StepFunction | None = None,
    optimizer: Any = None,
    mode: ProfileMode = "real",
    gradients: GradientsMode = "fresh",
    chunk_loss: bool = False,
    compile: bool = False,
    progress: Progress | None = None,
) -> ModelProfile:
    """Measure one training step of ``model`` and describe it as data.

    A ``batch`` that is a tuple or list is passed as ``model(*batch)``, a dict as ``model(**batch)``, anything else as
    ``model(batch)``. ``loss(output)`` returns the scalar to differentiate; with ``targets``, ``loss(output, targets)``,
    as ``torch.nn.CrossEntropyLoss()`` takes them. Without ``loss`` it is the output's own loss, or the output where
    that is a scalar; the mean of the floating outputs where neither is there, with a warning.

    In place of ``loss``, ``step(batch)`` (``step()`` where ``batch`` is None) is a training step as your loop runs it:
    forward passes, loss, backward passes, with its autocast, gradient scaler and accumulation, and with the optimizer
    if it steps one. ``optimizer`` is stepped at the end of the step, unless ``step`` does that; wrappers of optimizers
    and optimizers with a learning rate scheduler are accepted. ``gradients="kept"`` measures a step before which the
    gradients exist already, as with gradient accumulation or ``zero_grad(set_to_none=False)``.

    Everything is left as it was: weights, buffers, gradients, random number generators, the counters and caches that
    modules keep, the state of optimizers, schedulers and gradient scalers. A plan that is applied to the model is set
    aside while it is measured.

    Where the plain step does not fit the device, ``mode="fake"`` runs it on fake tensors, which take no memory: sizes
    are as exact, times are estimates. ``ModelProfile.measured_with`` says which it was.

    With ``chunk_loss``, the step is measured with a language model's output projection and cross-entropy in chunks of
    tokens, as `fit` describes it. A plan for that profile runs it in the same way.

    With ``compile``, the model's repeated blocks are also compiled, in several partitions that save more or less, and
    the step is measured with each: a plan for such a profile chooses a partition for each block.

    What takes long shows a progress bar on a terminal; ``progress`` takes its place.
    """
    refuse_unfit(model, mode)
    if compile:
        refuse_compiled_as_a_whole(model)
    warn_of_checkpointing(model, stacklevel=2)
    arguments = StepArguments(batch, loss, targets, step, optimizer, gradients)
    training_step = TrainingStep(model, arguments)
    takes_long = compile or not is_built()
    own_progress = progress_on_terminal() if takes_long else nullcontext(Quiet())
    with own_progress if progress is None else nullcontext(progress) as shown:
        build_engine(shown)
        shown.stage("profiling the plain step")
        measured = profile_of_step(training_step, mode, chunk_loss=chunk_loss)
        return with_compiled_blocks(measured, training_step, shown, chunk_loss=chunk_loss) if compile else measured


def profile_of_step(step: TrainingStep, mode: ProfileMode, *, chunk_loss: bool = False) -> ModelProfile:
    """Return the profile of ``step``, whose model has passed `refuse_unfit`; with ``chunk_loss``, of it in chunks."""
    try:
        with plans_set_aside(step.model), out_of_memory_on_cpu():
            if not chunk_loss:
                return _PROFILE_OF_STEP[mode](step)
            with loss_in_chunks(step.model) as lazy_head:
                profile = _PROFILE_OF_STEP[mode](step)
            return replace(profile, chunks_loss=lazy_head.has_chunked)
    except torch.OutOfMemoryError as error:
        raise MemfitError(
            "the plain step does not fit the device, so that it cannot be measured there; profile(..., mode='fake') "
            f"needs no memory, or take a smaller batch ({error})"
        ) from error


def profile_of_real_or_fake_step(step: TrainingStep, *, chunk_loss: bool = False) -> ModelProfile:
    """Return the profile of the real step, or where that does not fit the device, of one on fake tensors."""
    try:
        return profile_of_step(step, "real", chunk_loss=chunk_loss)
    except MemfitError as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
    # Outside of the handler, because an error that is being handled keeps alive what the failed step had made.
    return profile_of_step(step, "fake", chunk_loss=chunk_loss)


def refuse_unfit(model: object, mode: object) -> None:
    """Raise where ``model`` is no module that can be profiled in ``mode``."""
    if not isinstance(model, nn.Module):
        raise InvalidParameterError(f"model is a torch.nn.Module, got {type(model).__name__}")
    if mode not in _PROFILE_OF_STEP:
        raise InvalidParameterError(f"mode is 'real' or 'fake', got {mode!r}")
    refuse_fsdp1(model)
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        raise InvalidParameterError(
            f"this {type(model).__name__} has lazy modules without parameters yet; run the model once before profiling"
        )
    if mode == "real" and any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InvalidParameterError(
            f"this {type(model).__name__} is on the meta device and cannot run; use mode='fake', or move it to a device"
        )
