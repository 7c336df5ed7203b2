"""``profile``: measures one real training step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn

from memfit.capture.calibration import calibrated
from memfit.capture.clocks import clock_for, wait_for
from memfit.capture.kept_state import KeptState
from memfit.capture.layers import measured_blocks
from memfit.capture.op_costs import OpTimer, with_costs
from memfit.capture.recorder import NothingKeptError, StepRecorder
from memfit.capture.recording import Recording, values_of
from memfit.capture.scopes import ModuleScopes
from memfit.capture.step import Loss, TrainingStep
from memfit.errors import InvalidParameterError
from memfit.graph.model_profile import ModelProfile
from memfit.runtime.fingerprint import fingerprint_of
from memfit.runtime.forward_wrapping import is_wrapped
from memfit.runtime.ledger import peak_of

_NUM_TIMED_STEPS = 3
# Ops are timed for this long, or for as long as this many steps take, whichever is longer.
_OP_TIMING_SECONDS = 0.5
_OP_TIMING_STEPS = 4


def profile(
    model: nn.Module, batch: Any, *, loss: Loss | None = None, optimizer: torch.optim.Optimizer | None = None
) -> ModelProfile:
    """Measure one training step of ``model`` on ``batch`` and describe it as data.

    A tuple or list is passed as ``model(*batch)``, a dict as ``model(**batch)``, anything else as ``model(batch)``.
    ``loss(output)`` gives the scalar to differentiate; without it, the output's own loss, the output itself where it is
    a scalar, or the mean of its floating tensors. With an ``optimizer``, its step is part of the step. Everything is
    left as it was: weights, buffers, gradients, random number generators, the counters and caches that modules keep,
    and the optimizer's state.
    """
    _refuse_unfit(model)
    step = TrainingStep(model, batch, loss, optimizer)
    device = _device_of(step)
    state = KeptState(step)
    with state.kept_optimizer():
        with state.kept():
            step.run()
        with state.kept():
            scopes, recording = _recorded(step, device)
        with state.kept():
            natural = _recorded_without_saves(step, device)
        with state.kept(), _no_garbage_collection():
            peak_bytes = peak_of(step.run, device, held=recording.outside)
        seconds = []
        for _ in range(_NUM_TIMED_STEPS):
            with state.kept():
                seconds.append(_seconds_of(step.run, device))
        timer = OpTimer(clock_for(device), budget_seconds=max(_OP_TIMING_SECONDS, _OP_TIMING_STEPS * median(seconds)))
        with state.kept(), timer:
            step.run_forward_and_backward()
        ops = with_costs(recording.ops, recording.facts, timer.costs(), device)
        values = values_of(recording, natural)
        measured = ModelProfile(
            ops=ops,
            values=values,
            blocks=measured_blocks(model, list(scopes.seen), ops, values),
            peak_bytes=peak_bytes,
            step_seconds=median(seconds),
            device=str(device),
            fingerprint=fingerprint_of(model),
        )
        return calibrated(measured, step, state)


def _recorded(step: TrainingStep, device: torch.device) -> tuple[ModuleScopes, Recording]:
    scopes = ModuleScopes()
    recorder = StepRecorder(scopes, device, step.tensors())
    try:
        with scopes.watching(step.model), _no_garbage_collection():
            held = step.run(recorder.during)
    finally:
        recording = recorder.close()
    del held
    return scopes, recording


def _recorded_without_saves(step: TrainingStep, device: torch.device) -> Recording | None:
    """Record a forward pass in which autograd's saves keep nothing alive; None where the model cannot run so."""
    scopes = ModuleScopes()
    recorder = StepRecorder(scopes, device, step.tensors(), keeps_saves=False)
    try:
        with scopes.watching(step.model), _no_garbage_collection():
            held = step.run_forward(recorder.during)
    except NothingKeptError:
        return None
    finally:
        recording = recorder.close()
    del held
    return recording


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Let nothing die but by its last reference, so that two runs of one program see the same deaths."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _seconds_of(step: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    begin = time.perf_counter()
    step()
    wait_for(device)
    return time.perf_counter() - begin


def _device_of(step: TrainingStep) -> torch.device:
    for _, tensor in step.tensors():
        return tensor.device
    return torch.device("cpu")


def _refuse_unfit(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidParameterError(f"model is a torch.nn.Module, got {type(model).__name__}")
    if any(is_wrapped(module) for module in model.modules()):
        raise InvalidParameterError(
            f"a plan is at work on this {type(model).__name__} (or on a part of it); remove() it before profiling"
        )
