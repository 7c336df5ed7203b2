"""One method to run a step among those that are measured beside each other."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from rows import Row

# What to enter around steps to run them in one method.
Method = Callable[[], AbstractContextManager[Any]]


@dataclass
class Entrant:
    """A method, and what was measured of it so far."""

    method: Method
    is_slow: bool = False
    peak_bytes: int | None = None
    activation_peak_bytes: int | None = None
    gradient_error: float | None = None
    # Of one step, roughly: to know how many of them to run.
    rough_seconds: float = 1.0
    # Of each timed step.
    seconds: list[float] = field(default_factory=list)
    error: str | None = None

    def row(self, name: str, first_seconds: float) -> Row:
        """Return what was measured, beside the first method's ``first_seconds``."""
        row = Row(
            method=name,
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
        )
