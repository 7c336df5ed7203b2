"""The part of a profile's peak that tensors take, which fake tensors have as well."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from memfit import ModelProfile
from memfit.calibration.calibrating import UNACCOUNTED
from memfit.capture.measuring.other_memory import LEFT_BEHIND
from memfit.graph.model_profile import RecordedValue
from memfit.planning.simulate.counted_peaks import counted_plain_peak_bytes
from memfit.planning.step import Step


def peak_of_tensors(profile: ModelProfile) -> int:
    """Return the peak without what kernels allocate for themselves: fake tensors run no kernels."""
    ops = tuple(replace(op, workspace_bytes=0) for op in profile.ops)
    return counted_plain_peak_bytes(Step(replace(profile, ops=ops, values=values_of_tensors(profile))))


def values_of_tensors(profile: ModelProfile) -> tuple[RecordedValue, ...]:
    """Return the values that ops of one step made or read."""
    return tuple(value for value in profile.values if value.name not in (UNACCOUNTED, LEFT_BEHIND))


def described_ops(profile: ModelProfile) -> list[dict[str, Any]]:
    """Return the ops with values by their labels, and without what their kernels take: time and memory."""
    labels = _labels(profile)

    def labelled(indices: tuple[int | None, ...]) -> list[str | None]:
        return [None if index is None else labels[index] for index in indices]

    return [
        asdict(replace(op, seconds=0.0, workspace_bytes=0))
        | {name: labelled(getattr(op, name)) for name in ("inputs", "outputs", "rewrites", "hidden_writes")}
        for op in profile.ops
    ]


def described_values(profile: ModelProfile) -> list[dict[str, Any]]:
    """Return the values of tensors by their labels, in an order that does not depend on when they were first met."""
    labels = _labels(profile)
    first_of_storage: dict[int, str] = {}
    described = []
    for label, value in zip(labels, profile.values, strict=True):
        if value.name != UNACCOUNTED:
            first = first_of_storage.setdefault(value.storage, label)
            described.append(asdict(value) | {"name": label, "storage": first})
    return sorted(described, key=lambda value: (value["op_index"] is not None, value["op_index"], value["name"]))


def _labels(profile: ModelProfile) -> list[str]:
    """Return the names of the values, but for what a step reads from outside: that is numbered as it is first met.

    Fake tensors meet it at a view, the engine in C++ at the first op that reads the view.
    """
    return [f"outside {v.num_bytes}" if v.name.startswith("outside#") else v.name for v in profile.values]
