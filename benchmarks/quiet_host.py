"""Finds moments in which nobody disturbs the host.

A host that is shared runs at half of its speed whenever a neighbour uses the other half of a core, for tenths of a
second at a time. A step for which launching takes about as long as computing takes half as long again then, whichever
way it runs in. A little work that is always the same tells such moments apart: before steps, within them, and after.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

QUIET = 1.25
"""So much longer than ever may work take on a quiet core. Where a neighbour has half of it, it takes 1.7 times."""

# Enough to tell a neighbour from an interrupt, which is soon over; short enough to be done in the midst of a step.
_NUM_SAMPLES = 5
_LONGEST_WAIT_SECONDS = 0.5


class QuietHost:
    """Knows how fast a core of this host is when nobody disturbs it, and puts threads on such cores."""

    def __init__(self, work: Callable[[], object] | None = None) -> None:
        self._work = work or _a_little_work
        self.least_seconds = math.inf
        self._cores = itertools.cycle(sorted(os.sched_getaffinity(0)))

    def look(self) -> float:
        """Return how long a little work takes on the core that this thread is on: longer where it is disturbed."""
        seconds = statistics.median(self._seconds_of_work() for _ in range(_NUM_SAMPLES))
        self.least_seconds = min(self.least_seconds, seconds)
        return seconds

    def is_quiet(self, look_seconds: float) -> bool:
        """Return whether work takes about as little as it ever did."""
        return look_seconds <= QUIET * self.least_seconds

    def disturbed_share(self, num_looks: int = 20_000) -> float:
        """Return in how many of so many looks, at one core after the other, somebody else was at work."""
        with _threads_put_back():
            looks = [self._look_at(next(self._cores)) for _ in range(num_looks)]
        return sum(not self.is_quiet(look) for look in looks) / num_looks

    @contextmanager
    def two_cores(self, end_by: float = math.inf) -> Iterator[None]:
        """Hold this thread on a core of its own and all others on a second one, quiet ones if they are found.

        Forward passes are launched by the one, backward passes by another. On one core for both, each would find its
        caches full of the other's. After ``end_by`` (of time.perf_counter), or half a second, any cores will do.
        """
        with _threads_put_back():
            own, others = self._two_quiet_cores(min(end_by, time.perf_counter() + _LONGEST_WAIT_SECONDS))
            _put_others_on(others)
            os.sched_setaffinity(0, {own})
            yield

    def _two_quiet_cores(self, end_by: float) -> tuple[int, int]:
        """Return two cores; the same one twice where there is but one."""
        found: list[int] = []
        for core in self._cores:
            if self.is_quiet(self._look_at(core)) or time.perf_counter() >= end_by:
                found.append(core)
            if len(found) == 2:
                break
        own, others = found
        return own, others

    def _look_at(self, core: int) -> float:
        os.sched_setaffinity(0, {core})
        return self.look()

    def _seconds_of_work(self) -> float:
        begin = time.perf_counter()
        self._work()
        return time.perf_counter() - begin


def _a_little_work() -> int:
    return sum(number * number for number in range(600))


def _put_others_on(core: int) -> None:
    this_thread = threading.get_native_id()
    _put_on({core}, (thread for thread in _threads() if thread != this_thread))


@contextmanager
def _threads_put_back() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        _put_on(before, _threads())


def _threads() -> Iterator[int]:
    return map(int, os.listdir("/proc/self/task"))


def _put_on(cores: set[int], threads: Iterable[int]) -> None:
    for thread in threads:
        # It may have ended in between.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cores)
