"""Captures a training step by running it: recorded, measured as a whole, and timed op by op."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from memfit.capture.measuring.clocks import clock_for
from memfit.capture.measuring.devices import device_of, memory_bytes
from memfit.capture.measuring.fused_costs import with_fused_replays
from memfit.capture.measuring.link import measured_link
from memfit.capture.measuring.op_costs import OpMeter, with_costs
from memfit.capture.measuring.other_memory import with_other_memory
from memfit.capture.measuring.roofline import copied_bytes_per_second
from memfit.capture.measuring.step_times import SynchronizedStep, timed_back_to_back, timed_synchronized
from memfit.capture.measuring.throttling import throttled_ops, unthrottled_share
from memfit.capture.recording.measured_blocks import measured_blocks
from memfit.capture.recording.opaque_parts import opaque_parts
from memfit.capture.recording.recorded_runs import left_behind, no_garbage_collection, record_step
from memfit.capture.recording.step_recording import OpFacts, Recording, always_saved, values_of
from memfit.capture.state.kept_state import KeptState, existed_before
from memfit.capture.step_variants import Variants, choose_variant, random_states
from memfit.capture.training_step import TrainingStep
from memfit.distributed.wrapped_models import bare_model, warn_of_dtensors
from memfit.graph.model_profile import HostCosts, ModelProfile, Phase, RecordedOp
from memfit.runtime.allocation_meter import allocated_peak
from memfit.runtime.applying.fingerprint import fingerprint_of
from memfit.runtime.applying.model_inputs import noting_inputs
from memfit.runtime.engine.native_tape import fuses_on

# Ops are timed for this long, or for as long as this many steps take, whichever is longer.
_OP_TIMING_SECONDS = 1.0
_OP_TIMING_STEPS = 8


class CapturedStep(NamedTuple):
    """The profile of a step as far as plain runs give it, and what calibration needs beside it.

    ``profile.host`` has the seconds to launch the plain step only. ``forward_waits`` is whether the forward pass waits
    for a result of the device.
    """

    profile: ModelProfile
    synchronized: SynchronizedStep
    forward_waits: bool


def capture_real_step(step: TrainingStep, state: KeptState) -> CapturedStep:
    """Measure ``step`` on the device it runs on, inside the block of ``state.kept_optimizer()``."""
    device = device_of(step)
    device_bytes, free_bytes = memory_bytes(device)
    # These runs warm up, create the optimizer's state, and find what each run must put back.
    while not state.is_warm:
        with state.kept(), noting_inputs(step.model) as inputs:
            step.run()
    if step.warns and state.may_step_an_optimizer_later:
        warnings.warn(
            "step= refers to an optimizer and did not step it, neither in its first nor in its second run: the peak is "
            "that of a step without it. Where it is stepped in some steps only, as with accumulated gradients, or "
            'outside, pass optimizer=; where gradients add up from step to step, also gradients="kept"',
            stacklevel=2,
        )
    step.have_one_model = len(set(step.ranks.gathered(fingerprint_of(step.model)))) == 1
    recording, called, variants = _recorded(step, state, device)
    left = left_behind(step, state, device, recording)
    with state.kept(), no_garbage_collection():
        allocated_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
        peak_bytes = allocated_peak(step.run, device, held=recording.outside)
    synchronized = timed_synchronized(step, device, state)
    # A CPU computes as it launches: nothing runs ahead, and back-to-back steps are synchronized ones.
    on_host = device.type == "cpu"
    step_seconds = synchronized.seconds if on_host else timed_back_to_back(step, device, state, synchronized)
    unthrottled = _timed_ops(step, device, state, recording, synchronized)
    ops, host = unthrottled, None
    if not on_host:
        host = HostCosts(synchronized.forward_launched, synchronized.backward_launched, 0.0, 0.0, 0.0, 0.0, 0.0)
        ops = throttled_ops(unthrottled, host, step_seconds)
    values = values_of(recording)
    if fuses_on(device):
        ops = with_fused_replays(ops, recording.facts, values, copied_bytes_per_second(device))
    model = bare_model(step.model)
    blocks = measured_blocks(model, called, ops, values)
    skipped_bytes = variants.bytes_of_skipped_blocks(model, blocks, ops, values)
    profile = ModelProfile(
        ops=ops,
        values=with_other_memory(
            always_saved(values, left.values | variants.values_to_save(model, ops, blocks)),
            allocated_bytes=allocated_bytes,
            left_bytes=left.num_bytes,
            skipped_bytes=skipped_bytes,
        ),
        blocks=blocks,
        peak_bytes=peak_bytes + skipped_bytes,
        step_seconds=step_seconds,
        device=str(device),
        fingerprint=fingerprint_of(step.model),
        device_bytes=device_bytes,
        free_bytes=free_bytes,
        host=host,
        inputs=tuple(inputs),
        module_calls=recording.module_calls,
        link=measured_link(device),
        unthrottled_share=unthrottled_share(unthrottled, ops),
        notes=variants.notes + opaque_parts(model, recording),
        skipped_modules=variants.skipped_modules,
    )
    return CapturedStep(profile, synchronized, _forward_waits(ops, recording.facts))


def _recorded(step: TrainingStep, state: KeptState, device: torch.device) -> tuple[Recording, Sequence[str], Variants]:
    """Return a recording of the step, the modules that ran, and how its runs differ: the largest is recorded."""
    with state.kept():
        before = random_states()
        recording, called = record_step(step, device, existed_before)
        decides = before != random_states() or _forward_waits(recording.ops, recording.facts)
    if recording.has_dtensors:
        warn_of_dtensors(step.model)
    variants = choose_variant(step, state, device, decides=decides)
    for note in variants.notes if step.warns else ():
        warnings.warn(f"of the step of this {type(step.model).__name__}: {note}", stacklevel=2)
    if variants.notes:
        with state.kept():
            recording, called = record_step(step, device, existed_before)
    return recording, called, variants


def _timed_ops(
    step: TrainingStep, device: torch.device, state: KeptState, recording: Recording, synchronized: SynchronizedStep
) -> tuple[RecordedOp, ...]:
    meter = OpMeter(clock_for(device), max(_OP_TIMING_SECONDS, _OP_TIMING_STEPS * synchronized.seconds))
    with state.kept(), meter:
        step.run_forward_and_backward()
    return with_costs(recording.ops, recording.facts, meter.costs(), device)


def _forward_waits(ops: Sequence[RecordedOp], facts: list[OpFacts]) -> bool:
    return any(fact.is_answer and op.phase is Phase.FORWARD for op, fact in zip(ops, facts, strict=True))
