"""What ops take in the midst of a step, where each was timed on its own.

A GPU that multiplies matrices without a break draws all the power it may, and lowers its clocks; tried one at a time,
with pauses between, the same ops run at full speed. What is bound by memory hardly feels it. So where the device sets
the pace of the step, the seconds that the ops' sum falls short of the step's are given to the ops that compute, in
proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.graph.model_profile import RecordedOp

# Where the host needs more than this share of the step to launch it, pauses may be the host's.
_DEVICE_SETS_THE_PACE = 0.9
# Clocks do not drop further; what is missing beyond is something else.
_LARGEST_FACTOR = 1.25


def as_in_the_step(
    ops: Sequence[RecordedOp], *, step_seconds: float, launching_seconds: float
) -> tuple[RecordedOp, ...]:
    """Return ``ops`` with the seconds that they take in a step of ``step_seconds``, which took so long to launch."""
    computing_seconds = sum(op.seconds for op in ops if op.flops)
    missing_seconds = step_seconds - sum(op.seconds for op in ops)
    if computing_seconds <= 0 or missing_seconds <= 0 or launching_seconds > _DEVICE_SETS_THE_PACE * step_seconds:
        return tuple(ops)
    factor = min(1 + missing_seconds / computing_seconds, _LARGEST_FACTOR)
    return tuple(replace(op, seconds=op.seconds * factor) if op.flops else op for op in ops)
