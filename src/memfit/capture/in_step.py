"""What ops and the host take in the midst of training, where each was timed on its own.

A GPU that multiplies matrices without a break draws all the power it may, and lowers its clocks; tried one at a time,
with pauses between, the same ops run at full speed. What is bound by memory hardly feels it. So where the device sets
the pace, the seconds that the ops' sum falls short of the step's are given to the ops that compute, in proportion.

Launching is timed at its best, in steps alone. Where the host sets the pace, or nearly does, and steps in a row take
longer than host and device explain, all that the host does takes longer by as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.capture.recording import OpFacts
from memfit.graph.model_profile import HOST_SECONDS, HostCosts, Phase, RecordedOp
from memfit.planning.step_time import Seconds, device_seconds, seconds_in_a_row

# Where the host needs more than this share of the step to launch it, what is missing may be the host's.
_DEVICE_SETS_THE_PACE = 0.7
# Clocks do not drop further; what is missing beyond is something else.
_LARGEST_FACTOR = 1.25
# Less than steps differ from each other.
_NO_DIFFERENCE = 0.01


def ops_in_the_step(ops: Sequence[RecordedOp], host: HostCosts, step_seconds: float) -> tuple[RecordedOp, ...]:
    """Return ``ops`` with the seconds that they take in a step of ``step_seconds``."""
    computing_seconds = sum(op.seconds for op in ops if op.flops)
    missing_seconds = step_seconds - sum(op.seconds for op in ops)
    if computing_seconds <= 0 or missing_seconds <= 0 or not device_sets_the_pace(host, step_seconds):
        return tuple(ops)
    factor = min(1 + missing_seconds / computing_seconds, _LARGEST_FACTOR)
    return tuple(replace(op, seconds=op.seconds * factor) if op.flops else op for op in ops)


def unthrottled_share(apart: Sequence[RecordedOp], in_the_step: Sequence[RecordedOp]) -> float:
    """Return what ops took when they were timed apart, with pauses, as a share of what they take in the step."""
    seconds = sum(op.seconds for op in in_the_step)
    return min(sum(op.seconds for op in apart) / seconds, 1.0) if seconds else 1.0


def host_in_the_step(host: HostCosts, ops: Sequence[RecordedOp], step_seconds: float) -> HostCosts:
    """Return ``host`` with the seconds that it takes in steps of ``step_seconds``."""
    if device_sets_the_pace(host, step_seconds):
        return host
    launching = Seconds(host.forward, host.backward)
    explained_seconds = seconds_in_a_row(launching, device_seconds(ops), runs_ahead=host.runs_ahead)
    factor = max(step_seconds / explained_seconds, 1.0)
    return replace(host, **{name: factor * getattr(host, name) for name in HOST_SECONDS})


def runs_ahead(
    host: HostCosts,
    ops: Sequence[RecordedOp],
    facts: Sequence[OpFacts],
    *,
    step_seconds: float,
    alone_seconds: float,
) -> bool:
    """Return whether a step in a row is launched before the last one is done, so that it is faster than one alone.

    It is not where the forward pass waits for an answer of the device. A plain step may not show that, if its forward
    pass takes about as long to launch as to compute; plans do, for which launching takes longer.
    """
    if any(fact.is_answer and op.phase is Phase.FORWARD for op, fact in zip(ops, facts, strict=True)):
        return False
    launching, computing = Seconds(host.forward, host.backward), device_seconds(ops)
    ahead = seconds_in_a_row(launching, computing, runs_ahead=True)
    waiting = seconds_in_a_row(launching, computing, runs_ahead=False)
    return waiting <= (1 + _NO_DIFFERENCE) * ahead or alone_seconds - step_seconds >= (waiting - ahead) / 2


def device_sets_the_pace(host: HostCosts, step_seconds: float) -> bool:
    """Return whether the host launches a step in so much less than it takes that its own work hardly shows."""
    return host.forward + host.backward <= _DEVICE_SETS_THE_PACE * step_seconds
