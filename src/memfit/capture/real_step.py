"""Profiles a step by running it: recorded, timed op by op, measured as a whole, and tried with the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from memfit.capture.calibration import calibrated
from memfit.capture.clocks import clock_for, wait_for
from memfit.capture.devices import device_of, memory_bytes
from memfit.capture.kept_state import KeptState, existed_before
from memfit.capture.layers import measured_blocks
from memfit.capture.op_costs import OpTimer, with_costs
from memfit.capture.recorded_runs import no_garbage_collection, record_step, record_without_saves
from memfit.capture.recording import values_of
from memfit.capture.step import TrainingStep
from memfit.graph.model_profile import ModelProfile, RecordedValue
from memfit.runtime.fingerprint import fingerprint_of
from memfit.runtime.ledger import peak_of

_NUM_TIMED_STEPS = 3
# Ops are timed for this long, or for as long as this many steps take, whichever is longer.
_OP_TIMING_SECONDS = 0.5
_OP_TIMING_STEPS = 4


def profile_of_real_step(step: TrainingStep) -> ModelProfile:
    """Return the profile of ``step``, measured on the device it runs on."""
    device = device_of(step)
    device_bytes, free_bytes = memory_bytes(device)
    state = KeptState(step)
    with state.kept_optimizer():
        # The first run warms up, creates the optimizer's state, and shows what there is to be put back.
        with state.kept():
            step.run()
        with state.kept():
            recording, called = record_step(step, device, existed_before)
        with state.kept():
            natural = record_without_saves(step, device, existed_before)
        with state.kept(), no_garbage_collection():
            allocated_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
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
        if allocated_bytes is not None:
            values += _other_memory(values, recording.num_storages, allocated_bytes)
        profile = ModelProfile(
            ops=ops,
            values=values,
            blocks=measured_blocks(step.model, called, ops, values),
            peak_bytes=peak_bytes,
            step_seconds=median(seconds),
            device=str(device),
            fingerprint=fingerprint_of(step.model),
            device_bytes=device_bytes,
            free_bytes=free_bytes,
        )
        return calibrated(profile, step, state)


def _other_memory(
    values: tuple[RecordedValue, ...], num_storages: int, allocated_bytes: int
) -> tuple[RecordedValue, ...]:
    """Return, as a value from outside, what else the allocator holds: libraries' workspaces, other models."""
    known_bytes = sum({value.storage: value.num_bytes for value in values if value.op_index is None}.values())
    other_bytes = max(0, allocated_bytes - known_bytes)
    return (RecordedValue("(other memory on the device)", other_bytes, op_index=None, storage=num_storages),)


def _seconds_of(step: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    begin = time.perf_counter()
    step()
    wait_for(device)
    return time.perf_counter() - begin
