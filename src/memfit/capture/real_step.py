"""Profiles a step by running it: recorded, timed op by op, measured as a whole, and tried with the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import torch

from memfit.capture.calibration import calibrated
from memfit.capture.clocks import clock_for, wait_for
from memfit.capture.devices import device_of, memory_bytes
from memfit.capture.host_costs import measured_host_costs, with_fitted_host_costs
from memfit.capture.kept_state import KeptState, existed_before
from memfit.capture.layers import measured_blocks
from memfit.capture.op_costs import OpMeter, with_costs
from memfit.capture.other_memory import other_memory, unaccounted_memory
from memfit.capture.recorded_runs import no_garbage_collection, record_step, record_without_saves
from memfit.capture.recording import values_of
from memfit.capture.step import TrainingStep
from memfit.graph.model_profile import ModelProfile, Phase
from memfit.planning.planner import plan_of_all_that_replays
from memfit.runtime.apply import Applied
from memfit.runtime.fingerprint import fingerprint_of
from memfit.runtime.ledger import peak_of
from memfit.runtime.tape import Tape

_NUM_TIMED_STEPS = 3
# Ops are timed for this long, or for as long as this many steps take, whichever is longer.
_OP_TIMING_SECONDS = 1.0
_OP_TIMING_STEPS = 8


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
        plain = _timed(step, device, state)
        timing_seconds = max(_OP_TIMING_SECONDS, _OP_TIMING_STEPS * plain.step_seconds)
        meter = OpMeter(clock_for(device), timing_seconds)
        with state.kept(), meter:
            step.run_forward_and_backward()
        ops = with_costs(recording.ops, recording.facts, meter.costs(), device)
        values = values_of(recording, natural)
        if allocated_bytes is not None:
            values += (other_memory(values, allocated_bytes),)
        values += unaccounted_memory(ops, values, peak_bytes)
        profile = ModelProfile(
            ops=ops,
            values=values,
            blocks=measured_blocks(step.model, called, ops, values),
            peak_bytes=peak_bytes,
            step_seconds=plain.step_seconds,
            device=str(device),
            fingerprint=fingerprint_of(step.model),
            device_bytes=device_bytes,
            free_bytes=free_bytes,
            host=None if device.type == "cpu" else measured_host_costs(plain.forward_launched, plain.backward_launched),
        )
        profile = calibrated(profile, step, state)
        recording_all = plan_of_all_that_replays(profile)
        if profile.host is None or not recording_all.regions:
            return profile
        with Applied(step.model, recording_all, Tape):
            listening = _timed(step, device, state)
        return with_fitted_host_costs(profile, recording_all, listening.forward_launched, listening.backward_launched)


class _Timing(NamedTuple):
    """Medians: the seconds to launch the forward pass and the rest of the step, and until all of it was done."""

    forward_launched: float
    backward_launched: float
    step_seconds: float


def _timed(step: TrainingStep, device: torch.device, state: KeptState) -> _Timing:
    """Run the step several times, leaving no trace of it."""
    timings = []
    for _ in range(_NUM_TIMED_STEPS):
        forward_end = 0.0

        @contextmanager
        def around(phase: Phase) -> Iterator[None]:
            nonlocal forward_end
            yield
            if phase is Phase.FORWARD:
                forward_end = time.perf_counter()

        with state.kept():
            wait_for(device)
            begin = time.perf_counter()
            held = step.run(around)
            launched = time.perf_counter()
            del held
            wait_for(device)
            timings.append((forward_end - begin, launched - forward_end, time.perf_counter() - begin))
    return _Timing(*map(median, zip(*timings, strict=True)))
