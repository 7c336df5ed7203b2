"""Finds moments in which nobody disturbs the host.

A host that is shared runs at half of its speed whenever a neighbour uses the other half of a core, for tenths of a
second at a time. A step for which launching takes about as long as computing takes half as long again then, whichever
way it runs in. A little work that is always the same tells such moments apart, before and after what is to be timed.
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
from typing import Generic, NamedTuple, TypeVar

_Result = TypeVar("_Result")
# So much longer than it ever took, and something else is at work. Two halves of a core take 1.7 times as long.
_DISTURBED = 1.25
_NUM_SAMPLES = 5
_LONGEST_WAIT_SECONDS = 0.5
# What is disturbed again and again is taken as it is.
_MOST_TRIES = 4


class Moment(NamedTuple, Generic[_Result]):
    """What was run in the last of a few moments, whether that was a quiet one, and how many were not."""

    result: _Result
    is_quiet: bool
    num_disturbed: int


class QuietHost:
    """Runs what is to be timed in quiet moments: this thread on a core of its own, all others on a second one.

    Forward passes are launched by the one, backward passes by another. On one core for both, each would find its caches
    full of the other's.
    """

    def __init__(self, work: Callable[[], object] | None = None) -> None:
        self._work = work or _a_little_work
        self._least_seconds = math.inf
        self._cores = itertools.cycle(sorted(os.sched_getaffinity(0)))

    def undisturbed(self, run: Callable[[], _Result], limit_seconds: float = math.inf) -> Moment[_Result]:
        """Return what ``run`` gave in a quiet moment, or in the last of a few.

        After ``limit_seconds`` it is not run again.
        """
        end = time.perf_counter() + limit_seconds
        num_disturbed = 0
        with _threads_put_back():
            while True:
                own, others = self._two_quiet_cores(min(end, time.perf_counter() + _LONGEST_WAIT_SECONDS))
                _put_others_on(others)
                os.sched_setaffinity(0, {own})
                result = run()
                if self._is_quiet(own) and self._is_quiet(others):
                    return Moment(result, True, num_disturbed)
                num_disturbed += 1
                if num_disturbed == _MOST_TRIES or time.perf_counter() >= end:
                    return Moment(result, False, num_disturbed)

    def _two_quiet_cores(self, end: float) -> tuple[int, int]:
        """Return two cores, quiet ones if they are found by then; the same one twice where there is but one."""
        found: list[int] = []
        for core in self._cores:
            if self._is_quiet(core) or time.perf_counter() >= end:
                found.append(core)
            if len(found) == 2:
                break
        own, others = found
        return own, others

    def _is_quiet(self, core: int) -> bool:
        os.sched_setaffinity(0, {core})
        seconds = statistics.median(self._seconds_of_work() for _ in range(_NUM_SAMPLES))
        self._least_seconds = min(self._least_seconds, seconds)
        return seconds <= _DISTURBED * self._least_seconds

    def _seconds_of_work(self) -> float:
        begin = time.perf_counter()
        self._work()
        return time.perf_counter() - begin


def _a_little_work() -> int:
    return sum(number * number for number in range(4000))


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
