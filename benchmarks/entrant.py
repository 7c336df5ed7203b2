"""One way to run a step among those that are measured beside each other."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from rows import Row
from timing import TimedStep

# What to enter around steps to run them in one way.
Way = Callable[[], AbstractContextManager[Any]]

# Steps that were disturbed are left out where there are so many others.
_FEWEST_QUIET_STEPS = 3


@dataclass
class Entrant:
    """A way, and what was measured of it so far."""

    way: Way
    is_slow: bool = False
    peak_bytes: int | None = None
    activation_peak_bytes: int | None = None
    gradient_error: float | None = None
    # Of one step, roughly: to know how many of them to run.
    rough_seconds: float = 1.0
    steps: list[TimedStep] = field(default_factory=list)
    error: str | None = None

    @property
    def seconds(self) -> list[float]:
        """Of all its steps that count."""
        quiet = [step.seconds for step in self.steps if step.is_quiet]
        return quiet if len(quiet) >= _FEWEST_QUIET_STEPS else [step.seconds for step in self.steps]

    def row(self, name: str, first_seconds: float) -> Row:
        """Return what was measured, beside the first way's ``first_seconds``."""
        row = Row(
            way=name,
            peak_bytes=self.peak_bytes,
            activation_peak_bytes=self.activation_peak_bytes,
            gradients_equal=None if self.gradient_error is None else self.gradient_error == 0.0,
            gradient_error=self.gradient_error,
            error=self.error,
        )
        times = self.seconds
        if not times:
            return row
        median = statistics.median(times)
        low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        return replace(
            row,
            median_ms=1e3 * median,
            quartiles_ms=(1e3 * low, 1e3 * high),
            ratio=median / first_seconds,
            num_timed_steps=len(times),
            num_disturbed=sum(not step.is_quiet for step in self.steps),
        )
