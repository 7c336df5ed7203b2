"""Profiles a step by running it: recorded, timed op by op, measured as a whole, and tried with the engine."""

from __future__ import annotations

from dataclasses import replace

import torch

from memfit.capture.calibration import calibrated
from memfit.capture.clocks import clock_for
from memfit.capture.devices import device_of, memory_bytes
from memfit.capture.fused_costs import with_fused_replays
from memfit.capture.host_costs import measured_host_costs, with_fitted_host_costs
from memfit.capture.in_step import (
    device_sets_the_pace,
    host_in_the_step,
    ops_in_the_step,
    runs_ahead,
    unthrottled_share,
)
from memfit.capture.kept_state import KeptState, existed_before
from memfit.capture.layers import measured_blocks
from memfit.capture.link import measured_link
from memfit.capture.op_costs import OpMeter, with_costs
from memfit.capture.other_memory import other_memory, unaccounted_memory
from memfit.capture.recorded_runs import no_garbage_collection, record_step, record_without_saves
from memfit.capture.recording import values_of
from memfit.capture.roofline import copied_bytes_per_second
from memfit.capture.step_times import timed_alone, timed_in_a_row, timed_in_turns
from memfit.capture.training_step import TrainingStep
from memfit.graph.model_profile import ModelProfile
from memfit.planning.planner import plan_of_every_second_that_replays
from memfit.runtime.apply import Applied
from memfit.runtime.fingerprint import fingerprint_of
from memfit.runtime.ledger import peak_of
from memfit.runtime.model_inputs import noting_inputs
from memfit.runtime.native_tape import fuses_on
from memfit.runtime.tape_choice import TapeChoice

# Ops are timed for this long, or for as long as this many steps take, whichever is longer.
_OP_TIMING_SECONDS = 1.0
_OP_TIMING_STEPS = 8
# How often a step that replays takes turns with the plain one, to tell what the host spends on it: where that hardly
# shows, and where it does, so that a host that others use, too, is met at its usual speed.
_FEW_TURNS, _MANY_TURNS = 2, 7


def profile_of_real_step(step: TrainingStep) -> ModelProfile:
    """Return the profile of ``step``, measured on the device it runs on."""
    device = device_of(step)
    device_bytes, free_bytes = memory_bytes(device)
    state = KeptState(step)
    with state.kept_optimizer():
        # The first run warms up, creates the optimizer's state, and shows what there is to be put back.
        with state.kept(), noting_inputs(step.model) as inputs:
            step.run()
        with state.kept():
            recording, called = record_step(step, device, existed_before)
        with state.kept():
            natural = record_without_saves(step, device, existed_before)
        with state.kept(), no_garbage_collection():
            allocated_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
            peak_bytes = peak_of(step.run, device, held=recording.outside)
        alone = timed_alone(step, device, state)
        # A CPU computes as it launches: nothing runs ahead, and steps in a row are steps alone.
        step_seconds = alone.seconds if device.type == "cpu" else timed_in_a_row(step, device, state, alone)
        timing_seconds = max(_OP_TIMING_SECONDS, _OP_TIMING_STEPS * alone.seconds)
        meter = OpMeter(clock_for(device), timing_seconds)
        with state.kept(), meter:
            step.run_forward_and_backward()
        ops = with_costs(recording.ops, recording.facts, meter.costs(), device)
        host, rested = None, 1.0
        if device.type != "cpu":
            host = measured_host_costs(alone.forward_launched, alone.backward_launched)
            is_ahead = runs_ahead(host, ops, recording.facts, step_seconds=step_seconds, alone_seconds=alone.seconds)
            host = replace(host, runs_ahead=is_ahead)
            timed_apart, ops = ops, ops_in_the_step(ops, host, step_seconds)
            rested = unthrottled_share(timed_apart, ops)
        values = values_of(recording, natural)
        if fuses_on(device):
            ops = with_fused_replays(ops, recording.facts, values, copied_bytes_per_second(device))
        if allocated_bytes is not None:
            values += (other_memory(values, allocated_bytes),)
        profile = ModelProfile(
            ops=ops,
            values=values,
            blocks=measured_blocks(step.model, called, ops, values),
            peak_bytes=peak_bytes,
            step_seconds=step_seconds,
            device=str(device),
            fingerprint=fingerprint_of(step.model),
            device_bytes=device_bytes,
            free_bytes=free_bytes,
            host=host,
            inputs=tuple(inputs),
            link=measured_link(device),
            unthrottled_share=rested,
        )
        profile = replace(profile, values=profile.values + unaccounted_memory(profile))
        profile = calibrated(profile, step, state)
        # Not all: where everything is dropped, the engine stays in the host's caches, and all that it does takes less.
        listening_plan = plan_of_every_second_that_replays(profile)
        if profile.host is None or not listening_plan.recorded_modules:
            return profile
        hardly_matters = device_sets_the_pace(profile.host, step_seconds)
        plain, listening = timed_in_turns(
            step,
            device,
            state,
            lambda: Applied(step.model, listening_plan, TapeChoice()),
            num_turns=_FEW_TURNS if hardly_matters else _MANY_TURNS,
        )
        profile = replace(
            profile, host=replace(profile.host, forward=plain.forward_launched, backward=plain.backward_launched)
        )
        profile = with_fitted_host_costs(
            profile,
            listening_plan,
            listening.forward_launched - plain.forward_launched,
            listening.backward_launched - plain.backward_launched,
        )
        assert profile.host is not None
        return replace(profile, host=host_in_the_step(profile.host, profile.ops, step_seconds))
