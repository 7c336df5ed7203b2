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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

_Result = TypeVar("_Result")
# So much longer than it ever took, and something else is at work. Two halves of a core take 1.7 times as long.
_DISTURBED = 1.25
_NUM_SAMPLES = 5
_LONGEST_WAIT_SECONDS = 1.0
# What is disturbed again and again is taken as it is.
_MOST_TRIES = 4


class QuietHost:
    """Runs what is to be timed in quiet moments, on one core: two threads that take turns share its luck."""

    def __init__(self, work: Callable[[], object] | None = None) -> None:
        self._work = work or _a_little_work
        self._least_seconds = math.inf
        self._cores = itertools.cycle(sorted(_cores()))

    def undisturbed(self, run: Callable[[], _Result]) -> tuple[_Result, int]:
        """Return what ``run`` gave in a quiet moment, or in the last of a few, and how many were none."""
        with _threads_put_back():
            for num_disturbed in range(_MOST_TRIES):
                self._find_a_quiet_core()
                result = run()
                if self._is_quiet():
                    return result, num_disturbed
        return result, _MOST_TRIES

    def _find_a_quiet_core(self) -> None:
        end = time.perf_counter() + _LONGEST_WAIT_SECONDS
        for core in self._cores:
            _put_threads_on({core})
            if self._is_quiet() or time.perf_counter() >= end:
                return

    def _is_quiet(self) -> bool:
        seconds = statistics.median(self._seconds_of_work() for _ in range(_NUM_SAMPLES))
        self._least_seconds = min(self._least_seconds, seconds)
        return seconds <= _DISTURBED * self._least_seconds

    def _seconds_of_work(self) -> float:
        begin = time.perf_counter()
        self._work()
        return time.perf_counter() - begin


def _a_little_work() -> int:
    return sum(number * number for number in range(4000))


def _cores() -> set[int]:
    return os.sched_getaffinity(0)


def _put_threads_on(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            # It ended in between.
            continue


@contextmanager
def _threads_put_back() -> Iterator[None]:
    before = _cores()
    try:
        yield
    finally:
        _put_threads_on(before)
