"""Scales op times to the clock that the device runs at in training.

A GPU that multiplies matrices without a break reaches its power limit and lowers its clock. Ops that are timed one at a
time, with pauses between them, run at the full clock. Where the device limits the step, the seconds by which the sum of
the ops falls short of the step are added to the ops with FLOPs, in proportion; ops bound by memory hardly slow down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.graph.model_profile import HostCosts, RecordedOp

# Where the host needs more than this share of the step to launch it, the difference may be the host's.
_DEVICE_BOUND_SHARE = 0.7
# Clocks do not drop further; what is missing beyond has another cause.
_LARGEST_FACTOR = 1.25


def throttled_ops(ops: Sequence[RecordedOp], host: HostCosts, step_seconds: float) -> tuple[RecordedOp, ...]:
    """Return ``ops`` with the seconds that they take in a step of ``step_seconds``."""
    computing_seconds = sum(op.seconds for op in ops if op.flops)
    missing_seconds = step_seconds - sum(op.seconds for op in ops)
    if computing_seconds <= 0 or missing_seconds <= 0 or not is_device_bound(host, step_seconds):
        return tuple(ops)
    factor = min(1 + missing_seconds / computing_seconds, _LARGEST_FACTOR)
    return tuple(replace(op, seconds=op.seconds * factor) if op.flops else op for op in ops)


def unthrottled_share(unthrottled: Sequence[RecordedOp], throttled: Sequence[RecordedOp]) -> float:
    """Return the seconds of the ops timed with pauses, as a share of their seconds in the step."""
    seconds = sum(op.seconds for op in throttled)
    return min(sum(op.seconds for op in unthrottled) / seconds, 1.0) if seconds else 1.0


def is_device_bound(host: HostCosts, step_seconds: float) -> bool:
    """Return whether launching takes so much less than the step that the host's work hardly changes it."""
    return host.forward + host.backward <= _DEVICE_BOUND_SHARE * step_seconds
