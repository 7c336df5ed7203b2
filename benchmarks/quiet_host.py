"""Holds a process on a core or two of the host that are kept awake, and tells when somebody else disturbs it.

The host of a benchmark is often a share of a machine. Its cores are threads to that machine, which puts one that wakes
up wherever there is room: beside a neighbour, on the other half of a core, at half of the speed, until it finds a
better place some tenths of a second later. A training step goes from one core to another and back, because another
thread launches its backward pass, and lets each of them sleep meanwhile. A step for which launching takes about as long
as computing takes half as long again then, whichever way it runs in.

So all threads go on one core, which is never idle, or on two. A little work that is always the same tells how fast a
core is.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

QUIET = 1.25
"""On a quiet core work takes at most so many times what it ever took; where a neighbour has half of it, 1.7 times."""

# Enough to tell a neighbour from an interrupt, which is soon over; short enough to be done in the midst of a step.
_NUM_SAMPLES = 5
# So many more cores are kept awake than are needed, so that there are others to go to.
_NUM_OTHER_CORES = 2
# So many looks, a few hundredths of a second, tell how a core is just now.
_NUM_LOOKS = 200
# Whoever has something to do has the core at once; ends with the process that asked for it.
_STAY_AWAKE = """
import os
os.sched_setaffinity(0, {core})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == {parent}:
    sum(range(1_000_000))
"""


class QuietHost:
    """Knows how fast a core of this host is when nobody disturbs it, and holds threads on such cores.

    On one core, or this thread on one and all others on a second: forward passes are launched by this one, backward
    passes by another.
    """

    def __init__(self, num_cores: int = 1, *, work: Callable[[], object] | None = None) -> None:
        self.least_seconds = math.inf
        self._num_cores = num_cores
        self._work = work or _a_little_work
        # To choose from, and of these the own one first and that of the others last.
        self._cores: Sequence[int] = ()
        self._held: Sequence[int] = ()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold all threads of this process on so many cores, which are kept awake."""
        self._cores = cores_apart(sorted(os.sched_getaffinity(0)), _NUM_OTHER_CORES + self._num_cores)
        with ExitStack() as stack:
            for core in self._cores:
                stack.enter_context(_kept_awake(core))
            stack.enter_context(_threads_put_back())
            self._go_to_the_quietest()
            yield

    def look(self) -> float:
        """Return how long a little work takes on the core that this thread is on: longer where it is disturbed."""
        seconds = statistics.median(self._seconds_of_work() for _ in range(_NUM_SAMPLES))
        self.least_seconds = min(self.least_seconds, seconds)
        return seconds

    def is_quiet(self, look_seconds: float) -> bool:
        """Return whether work takes about as little as it ever did."""
        return look_seconds <= QUIET * self.least_seconds

    def settle(self) -> None:
        """Go to other cores if one of these is disturbed just now, and those are less."""
        if not all(self.is_quiet(self._seconds_on(core)) for core in self._held):
            self._go_to_the_quietest()
        elif self._held:
            os.sched_setaffinity(0, {self._held[0]})

    def disturbed_share(self, seconds: float = 3.0) -> float:
        """Return in how many looks, for so long, somebody else was at work on this core."""
        end = time.perf_counter() + seconds
        looks = self._looks(1)
        while time.perf_counter() < end:
            looks += self._looks(1)
        return sum(not self.is_quiet(look) for look in looks) / len(looks)

    def _go_to_the_quietest(self) -> None:
        self._held = sorted(self._cores, key=self._seconds_on)[: self._num_cores]
        _put_on({self._held[-1]}, _threads())
        os.sched_setaffinity(0, {self._held[0]})

    def _seconds_on(self, core: int) -> float:
        os.sched_setaffinity(0, {core})
        return statistics.median(self._looks(_NUM_LOOKS))

    def _looks(self, number: int) -> list[float]:
        return [self.look() for _ in range(number)]

    def _seconds_of_work(self) -> float:
        begin = time.perf_counter()
        self._work()
        return time.perf_counter() - begin


def cores_apart(cores: Sequence[int], number: int) -> Sequence[int]:
    """Return so many of ``cores``, spread over those no two of which are threads of one core of the machine.

    Its threads are numbered one after the other, or all first ones before all second ones; a virtual machine need not
    tell how. Every other one of the first half is right either way. Where there are too few of them, any will do.
    """
    alone = cores[: (len(cores) + 1) // 2 : 2]
    chosen_from = alone if len(alone) >= number else cores
    number = min(number, len(chosen_from))
    return [chosen_from[len(chosen_from) * place // number] for place in range(number)]


def _a_little_work() -> int:
    return sum(number * number for number in range(600))


@contextmanager
def _kept_awake(core: int) -> Iterator[None]:
    command = _STAY_AWAKE.format(core={core}, parent=os.getpid())
    process = subprocess.Popen([sys.executable, "-S", "-c", command])
    try:
        yield
    finally:
        process.kill()
        process.wait()


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
