"""The run of a step that makes a recording."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from memfit.capture.recording.module_scopes import ModuleScopes
from memfit.capture.recording.recorder import StepRecorder
from memfit.capture.recording.step_recording import Recording
from memfit.capture.training_step import TrainingStep
from memfit.distributed.wrapped_models import bare_model, fsdp_modules
from memfit.runtime.torch_internals import gather_buffers

IsOutside = Callable[[Tensor], bool]


def record_step(step: TrainingStep, device: torch.device, is_outside: IsOutside) -> tuple[Recording, list[str]]:
    """Record a run of the step; return that and the modules that ran, in order."""
    scopes = ModuleScopes()
    recorder = StepRecorder(scopes, device, step.tensors(), is_outside, buffers=_buffers_of(step))
    try:
        with scopes.watching(bare_model(step.model)), no_garbage_collection(), recorder.recording_ops():
            step.run(recorder.enter_phase if step.has_exact_phases else None)
    finally:
        recording = recorder.close()
    return recording, list(scopes.seen)


def _buffers_of(step: TrainingStep) -> list[Tensor]:
    return [buffer for module in fsdp_modules(step.model) for buffer in gather_buffers(module)]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Let nothing die but by its last reference, so that two runs of one program see the same deaths."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
