"""The runs of a step that are recorded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

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
        with scopes.tracking(bare_model(step.model)), no_garbage_collection(), recorder.recording_ops():
            step.run(recorder.enter_phase if step.has_exact_phases else None)
    finally:
        recording = recorder.close()
    recording.recomputed_modules = tuple(scopes.recomputed)
    recording.returns_cache = scopes.returns_cache
    return recording, list(scopes.seen)


class LeftBehind(NamedTuple):
    """What a forward pass leaves allocated until the next step has begun, such as an older autograd graph.

    ``values`` are those that no backward pass lets go of: a dropped one would keep what it is replayed from as long.
    """

    num_bytes: int = 0
    values: frozenset[int] = frozenset()


def left_behind(step: TrainingStep, state: KeptState, device: torch.device, recording: Recording) -> LeftBehind:
    """Return what the recorded step leaves behind, from two consecutive steps where it leaves anything.

    What stays for good, such as a cache, is not part of it.
    """
    if not any(step.ranks.gathered(_leaves_something(recording))):
        return LeftBehind()
    num_bytes = _bytes_left_behind(step, state, device)
    if not num_bytes:
        return LeftBehind()
    if step.num_steps_before:
        # What the step before left is among what the recorded step found.
        num_bytes = 0
    return LeftBehind(num_bytes, frozenset(save.value for save in recording.saves if save.released_after is None))


def _leaves_something(recording: Recording) -> bool:
    """Return whether something that the forward pass allocated outlives the step."""
    from_outside = {value.storage for value in recording.values if value.op_index is None}
    return any(
        value.op_index is not None
        and recording.ops[value.op_index].phase is Phase.FORWARD
        and value.storage not in recording.died_after
        and value.storage not in from_outside
        for value in recording.values
    )


def _bytes_left_behind(step: TrainingStep, state: KeptState, device: torch.device) -> int:
    with state.kept(may_write_more=True):
        step.run()
        state.begin_next()
        step.run()
    scopes = ModuleScopes()
    recorder = StepRecorder(scopes, device, step.tensors(), existed_before)
    with state.kept(), no_garbage_collection():
        try:
            with scopes.tracking(bare_model(step.model)), recorder.recording_ops():
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
