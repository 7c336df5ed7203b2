"""Profiles of steps of any size, from those of a few sizes that were measured.

Fake tensors give the exact bytes of every value for any size, and a roofline gives each op a first estimate of its
seconds. How the measured seconds of an op depend on that estimate is known from the measured sizes; between them, and
beyond, it is taken as a straight line. So are the bytes that only a real step has: workspaces, and memory that no op
accounts for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cache
from typing import Generic, NamedTuple, TypeVar

from memfit.calibration.calibrating import UNACCOUNTED
from memfit.capture.measuring.other_memory import outside_value
from memfit.capture.recording.plain_timeline import plain_timeline_bytes
from memfit.errors import MemfitError
from memfit.graph.model_profile import ModelProfile, Phase, RecordedOp, RecordedValue

Size = TypeVar("Size", bound=Hashable)


class ScaledProfiles(Generic[Size]):
    """Profiles of one step at any size. ``measured`` are those at the sizes that were measured.

    Where fake tensors cannot run the step, because it reads numbers out of a tensor, ``real`` measures each size.
    """

    def __init__(
        self,
        measured: Mapping[Size, ModelProfile],
        fake: Callable[[Size], ModelProfile],
        real: Callable[[Size], ModelProfile],
    ) -> None:
        real_ones = {size: profile for size, profile in measured.items() if profile.measured_with == "real step"}
        # Estimated seconds are no measure beside real ones: what did not fit the device is scaled from the rest.
        self._measured = real_ones or dict(measured)
        self._fake_at, self._real = cache(fake), real
        try:
            for size in self._measured:
                self._fake_at(size)
        except MemfitError:
            self._has_fakes = False
        else:
            self._has_fakes = True

    def at(self, size: Size) -> ModelProfile:
        """Return the profile of a step of that size."""
        if size in self._measured:
            return self._measured[size]
        if not self._has_fakes:
            self._measured[size] = self._real(size)
            return self._measured[size]
        fake = self._fake_at(size)
        small, large = self._neighbours(fake.step_seconds)
        return _interpolated(
            fake, self._fake_at(small), self._fake_at(large), self._measured[small], self._measured[large]
        )

    def difference(self, size: Size, other: Size) -> str | None:
        """Return in words how the structure of the step differs between two sizes; None where it does not.

        What counts is how often each module runs ops with floating-point operations to count, such as matrix products:
        copies and views also come and go where a size is 1. Without fake tensors it is not known.
        """
        if not self._has_fakes:
            return None
        one, two = (_products(self._fake_at(each)) for each in (size, other))
        for module in {**one, **two}:
            if one[module] != two[module]:
                where = "in the loss" if module is None else f"in {module!r}" if module else "in the model itself"
                return f"{one[module]} and {two[module]} matrix products and the like {where}"
        return None

    def _neighbours(self, seconds: float) -> tuple[Size, Size]:
        """Return the measured sizes between which a step lies by its estimated seconds, or the two closest to it."""
        sizes = sorted(self._measured, key=lambda size: self._fake_at(size).step_seconds)
        above = next(
            (place for place, size in enumerate(sizes) if self._fake_at(size).step_seconds >= seconds), len(sizes) - 1
        )
        return sizes[max(above - 1, 0)], sizes[max(above, min(1, len(sizes) - 1))]


def _interpolated(
    fake: ModelProfile, small_fake: ModelProfile, large_fake: ModelProfile, small: ModelProfile, large: ModelProfile
) -> ModelProfile:
    """Return ``fake`` with seconds and hidden bytes on the straight line through the small and the large step."""
    of_step = _Line(fake.step_seconds, small_fake.step_seconds, large_fake.step_seconds)
    step_seconds = of_step.seconds_at(small.step_seconds, large.step_seconds)
    # The step may take another path at another size, and a real one runs checks that a fake one does not: ops are found
    # by their names. One that was not measured keeps its share of the time.
    factor = step_seconds / fake.step_seconds if fake.step_seconds else 1.0
    measured = [_by_name(profile) for profile in (small_fake, large_fake, small, large)]
    ops = tuple(_op_at(op, [known.get(_name_of(op)) for known in measured], factor) for op in fake.ops)
    inexact = {value.name for profile in (small, large) for value in profile.values if not value.replays_exactly}
    values = tuple(replace(value, replays_exactly=value.name not in inexact) for value in fake.values)
    # The peak of a plain step is that of its fake one, and what only real steps have.
    extra = of_step.at(small.peak_bytes - small_fake.peak_bytes, large.peak_bytes - large_fake.peak_bytes)
    peak_bytes = fake.peak_bytes + max(0, round(extra))
    hidden_bytes = round(of_step.at(_unaccounted_bytes(small), _unaccounted_bytes(large)))
    # Whatever else a fake step lacks, such as what optimizers do with real tensors only, counts all the time.
    live_bytes = zip(plain_timeline_bytes(ops, values), ops, strict=True)
    known_bytes = max((num_bytes + op.workspace_bytes for num_bytes, op in live_bytes), default=0)
    hidden_bytes = max(hidden_bytes, peak_bytes - known_bytes)
    if hidden_bytes > 0:
        values += (outside_value(values, UNACCOUNTED, hidden_bytes),)
    return replace(
        fake,
        ops=ops,
        values=values,
        peak_bytes=peak_bytes,
        step_seconds=step_seconds,
        device_bytes=large.device_bytes,
        free_bytes=large.free_bytes,
        host=large.host,
        link=large.link,
        unthrottled_share=large.unthrottled_share,
        measured_with="fake tensors, between sizes that were measured",
        skipped_modules=large.skipped_modules,
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

    def seconds_at(self, small: float, large: float) -> float:
        """Return the seconds at the estimate; beyond the two sizes a larger step is never faster, despite noise."""
        seconds = max(0.0, self.at(small, large))
        if self.estimate >= self.large:
            return max(seconds, large)
        return min(seconds, small) if self.estimate <= self.small else seconds


def _op_at(fake: RecordedOp, measured: list[RecordedOp | None], factor: float) -> RecordedOp:
    """Return ``fake`` with what follows from the op of the same name in the small and large, fake and real steps."""
    small_fake, large_fake, small, large = measured
    if large_fake is None or large is None:
        replay_seconds = None if fake.replay_seconds is None else fake.replay_seconds * factor
        return replace(fake, seconds=fake.seconds * factor, replay_seconds=replay_seconds)
    if small_fake is None or small is None:
        # Only the large step runs it: it takes time in proportion to the estimate.
        small_fake, small = large_fake, large
    line = _Line(fake.seconds, small_fake.seconds, large_fake.seconds)
    replay_seconds = None
    if small.replay_seconds is not None and large.replay_seconds is not None:
        replay_seconds = line.seconds_at(small.replay_seconds, large.replay_seconds)
    return replace(
        fake,
        seconds=line.seconds_at(small.seconds, large.seconds),
        replay_seconds=replay_seconds,
        workspace_bytes=max(0, round(line.at(small.workspace_bytes, large.workspace_bytes))),
        replay=large.replay,
    )


def _by_name(profile: ModelProfile) -> dict[tuple[object, ...], RecordedOp]:
    return {_name_of(op): op for op in profile.ops}


def _name_of(op: RecordedOp) -> tuple[object, ...]:
    return op.module, op.op, op.call, op.phase, op.has_gradients


def _products(profile: ModelProfile) -> Counter[str | None]:
    return Counter(op.module for op in profile.ops if op.flops and op.phase is Phase.FORWARD)


def _unaccounted_bytes(profile: ModelProfile) -> int:
    return sum(value.num_bytes for value in profile.values if _is_unaccounted(value))


def _is_unaccounted(value: RecordedValue) -> bool:
    return value.name == UNACCOUNTED
