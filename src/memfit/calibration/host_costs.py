"""What the engine costs on the host, from whole steps with and without recording.

The costs of single events (an op recorded, a value dropped, ...) are typical ones, scaled so that together they give
the measured difference. Over the ten committed profiles (H200), fitted costs lie within 0.5 to 2.5 times the typical
ones in the forward pass and 0.2 to 1.7 times in the backward pass. On a CPU, where the host is the device, typical
costs are taken as they are: from one small model to another they vary by a factor of 2.5.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from memfit.calibration.trial_plans import plan_of_every_second_that_replays
from memfit.capture.measuring.step_times import timed_interleaved
from memfit.capture.measuring.throttling import is_device_bound
from memfit.capture.real_step import CapturedStep
from memfit.capture.state.kept_state import KeptState
from memfit.capture.training_step import TrainingStep
from memfit.graph.model_profile import HOST_SECONDS, HostCosts, ModelProfile
from memfit.graph.plan import Decision, Plan
from memfit.planning.simulate.simulator import simulated
from memfit.planning.step import Step
from memfit.planning.step.seconds import Seconds
from memfit.planning.step.step_time import back_to_back_seconds, device_seconds
from memfit.runtime.applying.apply import Applied
from memfit.runtime.engine.native_tape import engine_name, new_tape

# Medians of the ten committed profiles (H200, engine in C++), with 0.8e-6 more for a module, which was entered in C++
# then; the engine in Python on tensors of one element.
TYPICAL_SECONDS = {
    "C++": {
        "recorded_op": 1.0e-6,
        "dropped_op": 6.0e-6,
        "module_entry": 1.9e-6,
        "hooked_save": 8.0e-6,
        "replayed_op": 14.0e-6,
    },
    "Python": {
        "recorded_op": 27e-6,
        "dropped_op": 22e-6,
        "module_entry": 8e-6,
        "hooked_save": 12e-6,
        "replayed_op": 22e-6,
    },
}
# On a CPU (AMD EPYC): of a model of tiny ops, times 2.5, because larger ops displace the engine's code and data from
# the processor's caches. A plain step is launched for nothing.
TYPICAL_ON_CPU = {
    "C++": HostCosts(
        forward=0.0,
        backward=0.0,
        recorded_op=4e-7,
        dropped_op=1.3e-6,
        module_entry=2.6e-6,
        hooked_save=2.7e-6,
        replayed_op=2.7e-6,
        hooks_only_dropped_saves=True,
        planned_pass=9e-5,
    ),
    "Python": HostCosts(
        forward=0.0,
        backward=0.0,
        recorded_op=5e-6,
        dropped_op=17e-6,
        module_entry=9e-6,
        hooked_save=35e-6,
        replayed_op=35e-6,
        hooks_only_dropped_saves=True,
        planned_pass=23e-5,
    ),
}
# Disturbances of the host explain what lies outside of these factors.
_SMALLEST_FACTOR, _LARGEST_FACTOR = 0.2, 5.0
# Interleaved rounds of plain and recorded steps: few where launching hardly matters, else more.
_FEW_ROUNDS, _MANY_ROUNDS = 1, 5
# Less than steps differ from each other.
_NO_DIFFERENCE = 0.01


def with_host_costs(
    profile: ModelProfile, captured: CapturedStep, step: TrainingStep, state: KeptState
) -> ModelProfile:
    """Return ``profile`` with what the host spends on plans; unchanged where that is not known."""
    if profile.host is None:
        return replace(profile, host=TYPICAL_ON_CPU[engine_name()]) if profile.device == "cpu" else profile
    host = replace(
        profile.host,
        runs_ahead=runs_ahead(profile, captured.synchronized.seconds, forward_waits=captured.forward_waits),
        hooks_only_dropped_saves=engine_name() == "C++",
        **TYPICAL_SECONDS[engine_name()],
    )
    profile = replace(profile, host=host)
    # Every second value: where everything is dropped, the engine stays in the host's caches and costs less.
    plan = plan_of_every_second_that_replays(profile)
    if not any(step.ranks.gathered(plan.recorded_modules)):
        return profile
    num_rounds = _FEW_ROUNDS if is_device_bound(host, profile.step_seconds) else _MANY_ROUNDS
    plain, recorded = timed_interleaved(
        step,
        torch.device(profile.device),
        state,
        lambda: Applied(step.model, plan, new_tape, warns_of_calls=False),
        num_rounds=step.ranks.agreed(num_rounds),
    )
    host = replace(host, forward=plain.forward_launched, backward=plain.backward_launched)
    profile = with_fitted_host_costs(
        replace(profile, host=host),
        plan,
        recorded.forward_launched - plain.forward_launched,
        recorded.backward_launched - plain.backward_launched,
    )
    return with_back_to_back_host_costs(profile)


def with_fitted_host_costs(
    profile: ModelProfile, plan: Plan, forward_seconds: float, backward_seconds: float
) -> ModelProfile:
    """Return ``profile`` with host costs scaled to a step by ``plan`` that took so much longer to launch.

    That step offloads nothing: the host's cost of offloading is scaled like the costs of the forward pass.
    """
    host, link = profile.host, profile.link
    assert host is not None
    step = Step(profile)
    recomputed = {index for index in step.plannable if plan.decisions[profile.values[index].name] is Decision.RECOMPUTE}
    expected = step.recording.cost_of(recomputed, len(simulated(step, recomputed).replayed_ops))
    in_forward = _factor(forward_seconds, expected.forward)
    in_backward = _factor(backward_seconds, expected.backward)
    fitted = replace(
        host,
        recorded_op=host.recorded_op * in_forward,
        dropped_op=host.dropped_op * in_forward,
        module_entry=host.module_entry * in_forward,
        hooked_save=host.hooked_save * in_forward,
        replayed_op=host.replayed_op * in_backward,
    )
    # Offloading is measured by itself, at its best: it is never scaled down.
    return replace(
        profile,
        host=fitted,
        link=None if link is None else replace(link, host_seconds=link.host_seconds * max(in_forward, 1.0)),
    )


def with_back_to_back_host_costs(profile: ModelProfile) -> ModelProfile:
    """Return ``profile`` with the host's seconds in back-to-back steps, which are slower than synchronized ones.

    Where the host limits the step, and back-to-back steps take longer than host and device explain, all of the host's
    work takes longer by that factor.
    """
    host = profile.host
    assert host is not None
    if is_device_bound(host, profile.step_seconds):
        return profile
    launching = Seconds(host.forward, host.backward)
    explained_seconds = back_to_back_seconds(launching, device_seconds(profile.ops), runs_ahead=host.runs_ahead)
    factor = max(profile.step_seconds / explained_seconds, 1.0)
    return replace(profile, host=replace(host, **{name: factor * getattr(host, name) for name in HOST_SECONDS}))


def runs_ahead(profile: ModelProfile, synchronized_seconds: float, *, forward_waits: bool) -> bool:
    """Return whether a step is launched before the device is done with the one before, so that it is faster.

    It is not where the forward pass waits for a result of the device. A plain step may not show that, if its forward
    pass takes about as long to launch as to compute; plans do, for which launching takes longer.
    """
    assert profile.host is not None
    if forward_waits:
        return False
    launching, computing = Seconds(profile.host.forward, profile.host.backward), device_seconds(profile.ops)
    ahead = back_to_back_seconds(launching, computing, runs_ahead=True)
    waiting = back_to_back_seconds(launching, computing, runs_ahead=False)
    return (
        waiting <= (1 + _NO_DIFFERENCE) * ahead or synchronized_seconds - profile.step_seconds >= (waiting - ahead) / 2
    )


def _factor(measured: float, expected: float) -> float:
    return min(max(measured / expected, _SMALLEST_FACTOR), _LARGEST_FACTOR) if expected > 0.0 else 1.0
