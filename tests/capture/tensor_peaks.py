"""The part of a profile's peak that tensors take, which fake tensors have as well."""

from __future__ import annotations

from dataclasses import replace

from memfit import ModelProfile
from memfit.calibration.calibrating import UNACCOUNTED
from memfit.graph.model_profile import RecordedOp, RecordedValue
from memfit.planning.simulate.counted_peaks import counted_plain_peak_bytes
from memfit.planning.step import Step


def peak_of_tensors(profile: ModelProfile) -> int:
    """Return the peak without what kernels allocate for themselves: fake tensors run no kernels."""
    ops = tuple(replace(op, workspace_bytes=0) for op in profile.ops)
    return counted_plain_peak_bytes(Step(replace(profile, ops=ops, values=values_of_tensors(profile))))


def values_of_tensors(profile: ModelProfile) -> tuple[RecordedValue, ...]:
    """Return the values that ops made or read."""
    return tuple(value for value in profile.values if value.name != UNACCOUNTED)


def ops_without_kernels(profile: ModelProfile) -> tuple[RecordedOp, ...]:
    """Return the ops without what their kernels take: time and memory."""
    return tuple(replace(op, seconds=0.0, workspace_bytes=0) for op in profile.ops)
