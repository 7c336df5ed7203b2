"""Profiles of steps of any size, from those of a few sizes that were measured.

Fake tensors give the exact bytes of every value for any size, and a roofline gives each op a first estimate of its
seconds. How the measured seconds of an op depend on that estimate is known from the measured sizes; between them, and
beyond, it is taken as a straight line. So are the bytes that only a real step has: workspaces, and memory that no op
accounts for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from memfit.calibration.calibrating import UNACCOUNTED
from memfit.capture.measuring.other_memory import outside_value
from memfit.errors import MemfitError
from memfit.graph.model_profile import ModelProfile, RecordedOp, RecordedValue

FakeProfile = Callable[[int], ModelProfile]
RealProfile = Callable[[int], ModelProfile]


class ScaledProfiles:
    """Profiles of one step at any size. ``measured`` are those at the sizes that were measured.

    Where fake tensors cannot run the step, because it reads numbers out of a tensor, ``real`` measures each size.
    """

    def __init__(self, measured: Mapping[int, ModelProfile], fake: FakeProfile, real: RealProfile) -> None:
        self._measured = dict(measured)
        self._fake, self._real = fake, real
        self._fakes: dict[int, ModelProfile] = {}

    def at(self, size: int) -> ModelProfile:
        """Return the profile of a step of that size."""
        if size in self._measured:
            return self._measured[size]
        small, large = self._neighbours(size)
        try:
            fake, small_fake, large_fake = (self._fake_at(each) for each in (size, small, large))
        except MemfitError:
            self._measured[size] = self._real(size)
            return self._measured[size]
        return _interpolated(fake, small_fake, large_fake, self._measured[small], self._measured[large])

    def _fake_at(self, size: int) -> ModelProfile:
        if size not in self._fakes:
            self._fakes[size] = self._fake(size)
        return self._fakes[size]

    def _neighbours(self, size: int) -> tuple[int, int]:
        """Return the measured sizes between which the size lies, or the two that are closest to it."""
        sizes = sorted(self._measured)
        above = next((place for place, each in enumerate(sizes) if each >= size), len(sizes) - 1)
        return sizes[max(above - 1, 0)], sizes[max(above, min(1, len(sizes) - 1))]


def _interpolated(
    fake: ModelProfile, small_fake: ModelProfile, large_fake: ModelProfile, small: ModelProfile, large: ModelProfile
) -> ModelProfile:
    """Return ``fake`` with seconds and hidden bytes on the straight line through the small and the large step."""
    of_step = _Line(fake.step_seconds, small_fake.step_seconds, large_fake.step_seconds)
    step_seconds = max(0.0, of_step.at(small.step_seconds, large.step_seconds))
    profiles = (fake, small_fake, large_fake, small, large)
    if len({_calls(profile) for profile in profiles}) == 1:
        ops = tuple(_interpolated_op(*ops) for ops in zip(*(profile.ops for profile in profiles), strict=True))
    else:
        # The step takes another path at another size: its ops keep their shares of the time.
        factor = step_seconds / fake.step_seconds if fake.step_seconds else 1.0
        ops = tuple(_scaled(op, factor) for op in fake.ops)
    inexact = {value.name for profile in (small, large) for value in profile.values if not value.replays_exactly}
    values = tuple(replace(value, replays_exactly=value.name not in inexact) for value in fake.values)
    hidden_bytes = round(of_step.at(_unaccounted_bytes(small), _unaccounted_bytes(large)))
    if hidden_bytes > 0:
        values += (outside_value(values, UNACCOUNTED, hidden_bytes),)
    # The peak of a plain step is that of its fake one, and what only real steps have.
    extra = of_step.at(small.peak_bytes - small_fake.peak_bytes, large.peak_bytes - large_fake.peak_bytes)
    return replace(
        fake,
        ops=ops,
        values=values,
        peak_bytes=fake.peak_bytes + max(0, round(extra)),
        step_seconds=step_seconds,
        device_bytes=large.device_bytes,
        free_bytes=large.free_bytes,
        host=large.host,
        link=large.link,
        unthrottled_share=large.unthrottled_share,
        measured_with="fake tensors, between sizes that were measured",
    )


class _Line(NamedTuple):
    """The estimates at three sizes: what is measured at the small and the large one is a line over them.

    Where the two are one size, the line goes through the origin.
    """

    estimate: float
    small: float
    large: float

    def at(self, small: float, large: float) -> float:
        """Return what is ``small`` and ``large`` at those sizes, at the estimate."""
        if self.small != self.large:
            return small + (self.estimate - self.small) / (self.large - self.small) * (large - small)
        return large * (self.estimate / self.large) if self.large else large


def _interpolated_op(
    fake: RecordedOp, small_fake: RecordedOp, large_fake: RecordedOp, small: RecordedOp, large: RecordedOp
) -> RecordedOp:
    line = _Line(fake.seconds, small_fake.seconds, large_fake.seconds)
    replay_seconds = None
    if small.replay_seconds is not None and large.replay_seconds is not None:
        replay_seconds = max(0.0, line.at(small.replay_seconds, large.replay_seconds))
    return replace(
        fake,
        seconds=max(0.0, line.at(small.seconds, large.seconds)),
        replay_seconds=replay_seconds,
        workspace_bytes=max(0, round(line.at(small.workspace_bytes, large.workspace_bytes))),
        replay=large.replay,
    )


def _scaled(op: RecordedOp, factor: float) -> RecordedOp:
    replay_seconds = None if op.replay_seconds is None else op.replay_seconds * factor
    return replace(op, seconds=op.seconds * factor, replay_seconds=replay_seconds)


def _calls(profile: ModelProfile) -> tuple[tuple[str | None, str, str], ...]:
    return tuple((op.module, op.op, op.phase) for op in profile.ops)


def _unaccounted_bytes(profile: ModelProfile) -> int:
    return sum(value.num_bytes for value in profile.values if _is_unaccounted(value))


def _is_unaccounted(value: RecordedValue) -> bool:
    return value.name == UNACCOUNTED
