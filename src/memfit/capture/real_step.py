"""Captures a training step by running it: recorded, measured as a whole, and timed op by op."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from memfit.capture.measuring.clocks import clock_for
from memfit.capture.measuring.devices import device_of, memory_bytes
from memfit.capture.measuring.fused_costs import with_fused_replays
from memfit.capture.measuring.link import measured_link
from memfit.capture.measuring.op_costs import OpMeter, with_costs
from memfit.capture.measuring.other_memory import LEFT_BEHIND, SKIPPED_BLOCKS, other_memory, outside_value
from memfit.capture.measuring.roofline import copied_bytes_per_second
from memfit.capture.measuring.step_times import SynchronizedStep, timed_back_to_back, timed_synchronized
from memfit.capture.measuring.throttling import throttled_ops, unthrottled_share
from memfit.capture.recording.measured_blocks import (
    bytes_of_skipped_blocks,
    measured_blocks,
    values_leaving_skipped_blocks,
)
from memfit.capture.recording.recorded_runs import (
    bytes_left_behind,
    leaves_something,
    no_garbage_collection,
    record_step,
    values_saved_beyond,
)
from memfit.capture.recording.step_recording import OpFacts, Recording, values_of
from memfit.capture.state.kept_state import KeptState, existed_before
from memfit.capture.step_variants import choose_variant, random_states
from memfit.capture.training_step import TrainingStep
from memfit.distributed.wrapped_models import bare_model, warn_of_dtensors
from memfit.graph.model_profile import HostCosts, ModelProfile, Phase, RecordedOp, RecordedValue
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
    step.have_one_model = len(set(step.ranks.gathered(fingerprint_of(step.model)))) == 1
    with state.kept():
        before = random_states()
        recording, called = record_step(step, device, existed_before)
        decides = before != random_states() or _forward_waits(recording.ops, recording.facts)
    variants = choose_variant(step, state, device, recording.outside, decides=decides)
    if variants.notes:
        with state.kept():
            recording, called = record_step(step, device, existed_before)
    leaves = any(step.ranks.gathered(leaves_something(recording)))
    left_bytes = bytes_left_behind(step, state, device) if leaves else 0
    if recording.has_dtensors:
        warn_of_dtensors(step.model)
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
    if allocated_bytes is not None:
        values += (other_memory(values, allocated_bytes),)
    if variants.varying:
        values = tuple(
            replace(value, replays_exactly=value.replays_exactly and not _is_made_by(value, ops, variants.varying))
            for value in values
        )
    if left_bytes:
        # A dropped one would keep what it is replayed from as long.
        kept = values_saved_beyond(recording)
        values = tuple(
            replace(value, replays_exactly=value.replays_exactly and index not in kept)
            for index, value in enumerate(values)
        )
        values += (outside_value(values, LEFT_BEHIND, left_bytes),)
    blocks = measured_blocks(bare_model(step.model), called, ops, values)
    if variants.skipped:
        leaving = values_leaving_skipped_blocks(bare_model(step.model), variants.skipped, ops, blocks)
        values = tuple(
            replace(value, replays_exactly=value.replays_exactly and index not in leaving)
            for index, value in enumerate(values)
        )
    if skipped_bytes := bytes_of_skipped_blocks(bare_model(step.model), blocks, variants.called):
        values += (outside_value(values, SKIPPED_BLOCKS, skipped_bytes),)
        peak_bytes += skipped_bytes
    profile = ModelProfile(
        ops=ops,
        values=values,
        blocks=blocks,
        peak_bytes=peak_bytes,
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
        notes=variants.notes,
    )
    return CapturedStep(profile, synchronized, _forward_waits(ops, recording.facts))


def _timed_ops(
    step: TrainingStep, device: torch.device, state: KeptState, recording: Recording, synchronized: SynchronizedStep
) -> tuple[RecordedOp, ...]:
    meter = OpMeter(clock_for(device), max(_OP_TIMING_SECONDS, _OP_TIMING_STEPS * synchronized.seconds))
    with state.kept(), meter:
        step.run_forward_and_backward()
    return with_costs(recording.ops, recording.facts, meter.costs(), device)


def _is_made_by(value: RecordedValue, ops: Sequence[RecordedOp], kinds: Collection[tuple[str, str]]) -> bool:
    if value.op_index is None:
        return False
    op = ops[value.op_index]
    return op.module is not None and (op.module, op.op) in kinds


def _forward_waits(ops: Sequence[RecordedOp], facts: list[OpFacts]) -> bool:
    return any(fact.is_answer and op.phase is Phase.FORWARD for op, fact in zip(ops, facts, strict=True))
