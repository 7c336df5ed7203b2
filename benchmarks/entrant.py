"""One way to run a step among those that are measured beside each other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from rows import Row
from timing import TimedStep

# What to enter around steps to run them in one way.
Way = Callable[[], AbstractContextManager[Any]]

# Of how many steps each way must have, those are counted of all ways in which the host was disturbed least.
_FEWEST_STEPS = 5


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

    def seconds(self, limit: float = math.inf) -> list[float]:
        """Return those of its steps in which a look at the host took no longer than the limit, or nobody looked."""
        return [step.seconds for step in self.steps if step.look_seconds is None or step.look_seconds <= limit]

    def steps_in_words(self, least_seconds: float) -> str:
        """Return each step, as "milliseconds@looks", these relative to the least that one ever took."""
        looked = [(1e3 * step.seconds, step.look_seconds) for step in self.steps]
        return " ".join(f"{ms:.2f}@{look / least_seconds:.2f}" for ms, look in looked if look is not None)

    def row(self, name: str, first_seconds: float, limit: float = math.inf) -> Row:
        """Return what was measured, beside the first way's ``first_seconds``."""
        row = Row(
            way=name,
            peak_bytes=self.peak_bytes,
            activation_peak_bytes=self.activation_peak_bytes,
            gradients_equal=None if self.gradient_error is None else self.gradient_error == 0.0,
            gradient_error=self.gradient_error,
            error=self.error,
        )
        times = self.seconds(limit) or self.seconds()
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
            num_disturbed=len(self.steps) - len(times),
        )


def limit_of_looks(entrants: Iterable[Entrant], quiet_seconds: float) -> float:
    """Return how long looks at the host may take in steps that count.

    As long as on a quiet host, or as long as it takes for each way to have a few steps: all are compared on a host that
    is as fast, be it disturbed or not. Slow ways have what few steps they have, and those that failed are out.
    """
    limits = [quiet_seconds]
    for entrant in entrants:
        looks = sorted(step.look_seconds for step in entrant.steps if step.look_seconds is not None)
        if looks and not entrant.is_slow and entrant.error is None:
            limits.append(looks[min(_FEWEST_STEPS, len(looks)) - 1])
    return max(limits)
