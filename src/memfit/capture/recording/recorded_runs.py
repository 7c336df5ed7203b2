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
from memfit.capture.state.kept_state import KeptState, existed_before
from memfit.capture.training_step import TrainingStep
from memfit.distributed.wrapped_models import bare_model, fsdp_modules
from memfit.graph.model_profile import Phase
from memfit.runtime.torch_internals import gather_buffers

IsOutside = Callable[[Tensor], bool]


def record_step(step: TrainingStep, device: torch.device, is_outside: IsOutside) -> tuple[Recording, list[str]]:
    """Record a run of the step; return that and the modules that ran, in order."""
    scopes = ModuleScopes()
    recorder = StepRecorder(scopes, device, step.tensors(), is_outside, buffers=_buffers_of(step))
    try:
        with scopes.save_hooks(bare_model(step.model)), no_garbage_collection(), recorder.recording_ops():
            step.run(recorder.enter_phase if step.has_exact_phases else None)
    finally:
        recording = recorder.close()
    return recording, list(scopes.seen)


def bytes_left_behind(step: TrainingStep, state: KeptState, device: torch.device) -> int:
    """Return what a forward pass leaves allocated until the next step is under way, such as an older autograd graph.

    What stays for good, such as a cache, is not part of it.
    """
    with state.kept(may_write_more=True):
        step.run()
        state.begin_next()
        step.run()
    scopes = ModuleScopes()
    recorder = StepRecorder(scopes, device, step.tensors(), existed_before)
    with state.kept(), no_garbage_collection():
        try:
            with scopes.save_hooks(bare_model(step.model)), recorder.recording_ops():
                step.run(recorder.enter_phase if step.has_exact_phases else None)
                num_ops = len(recorder.recording.ops)
                state.begin_next()
                step.run(recorder.enter_phase if step.has_exact_phases else None)
        finally:
            recording = recorder.close()
    left = {
        value.storage: value.num_bytes
        for value in recording.values
        if value.op_index is not None
        and value.op_index < num_ops <= recording.died_after.get(value.storage, -1)
        and recording.ops[value.op_index].phase is Phase.FORWARD
    }
    return sum(left.values())


def leaves_something(recording: Recording) -> bool:
    """Return whether something that the forward pass made outlives the step."""
    return any(
        value.op_index is not None
        and recording.ops[value.op_index].phase is Phase.FORWARD
        and value.storage not in recording.died_after
        for value in recording.values
    )


def values_saved_beyond(recording: Recording) -> set[int]:
    """Return the values that autograd still has a save of when the step is over, since no backward pass went there."""
    return {save.value for save in recording.saves if save.released_after is None}


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
