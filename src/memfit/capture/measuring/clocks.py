"""Measures how long one call takes on a device, and what it takes of the device's memory while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, TypeAlias

import torch

from memfit.runtime.allocation_meter import allocated_inside
from memfit.runtime.torch_internals import keep_gpu_busy

Call = Callable[[], object]

_MIN_REPEATS = 3
_MAX_REPEATS = 30
# Enough to see past a single disturbance; what takes longer is repeated less.
_SECONDS_PER_CALL = 2e-3
# About as long as a slow host takes to launch an op from Python.
_USUAL_LAUNCH_SECONDS = 100e-6


def host_time(device: torch.device) -> Callable[[], float]:
    """Return the clock of the host, in seconds, for what runs on ``device``.

    Where one thread computes, its own time does not count what other programs do meanwhile.
    """
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def wait_for(device: torch.device) -> None:
    """Return when all work queued on ``device`` is done."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


class CudaMoments:
    """Moments of what a GPU does, marked as it is launched."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Mark the moment at which the device is done with all that was launched until now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def seconds_between(self) -> list[float]:
        """Wait for the device, and return the seconds from each moment to the next."""
        wait_for(self._device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(self._events)]


class HostMoments:
    """Moments of the host, which computes as it launches."""

    def __init__(self) -> None:
        self._moments: list[float] = []

    def mark(self) -> None:
        """Mark this moment."""
        self._moments.append(time.perf_counter())

    def seconds_between(self) -> list[float]:
        """Return the seconds from each moment to the next."""
        return [end - begin for begin, end in pairwise(self._moments)]


def moments_on(device: torch.device) -> CudaMoments | HostMoments:
    """Return what marks moments on ``device``."""
    return CudaMoments(device) if device.type == "cuda" else HostMoments()


class HostClock:
    """The host's time: the median of repeats after a first run that warms caches up."""

    def __init__(self) -> None:
        self._now = host_time(torch.device("cpu"))

    def seconds_of(self, call: Call) -> float:
        """Run ``call`` several times and return the seconds of one run."""
        first = self._seconds(call)
        repeats = min(_MAX_REPEATS, max(_MIN_REPEATS, int(_SECONDS_PER_CALL / max(first, 1e-7))))
        return median(self._seconds(call) for _ in range(repeats))

    def run_weighed(self, call: Call) -> tuple[Any, int]:
        """Run ``call`` once and return its result and the most bytes that it held beyond that."""
        return allocated_inside(call)

    def run_timed(self, call: Call) -> tuple[Any, float]:
        """Run ``call`` once and return its result and its seconds."""
        begin = self._now()
        result = call()
        return result, self._now() - begin

    def _seconds(self, call: Call) -> float:
        return self.run_timed(call)[1]


class CudaClock:
    """CUDA events around many launches at once, queued behind a pause so that no gap between launches is counted."""

    _NUM_BATCHES = 3
    # The pause is so much longer than the launches have taken before.
    _PAUSE_MARGIN = 1.5
    # A call that takes longer to launch waits for something, and its gaps are its own.
    _LONGEST_PAUSE_SECONDS = 20e-3

    def __init__(self, device: torch.device) -> None:
        self._device = device
        properties = torch.cuda.get_device_properties(device)
        self._cycles_per_second = 1e3 * getattr(properties, "clock_rate", 2_000_000)

    def seconds_of(self, call: Call) -> float:
        """Run ``call`` several times and return the seconds of one run."""
        call()
        launch_seconds = self._launch_seconds(call)
        once = self._seconds(call, 1, launch_seconds)
        repeats = min(_MAX_REPEATS, max(_MIN_REPEATS, int(_SECONDS_PER_CALL / max(once, 1e-6))))
        return median(self._seconds(call, repeats, launch_seconds) for _ in range(self._NUM_BATCHES))

    def run_weighed(self, call: Call) -> tuple[Any, int]:
        """Run ``call`` once and return its result and the most bytes that it held beyond that."""
        # The allocator counts on the host as calls are made; the device need not have run them.
        torch.cuda.reset_peak_memory_stats(self._device)
        result = call()
        # Looked up by name, these two numbers would take longer than many an op.
        allocated = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        return result, max(0, allocated["peak"] - allocated["current"])

    def run_timed(self, call: Call) -> tuple[Any, float]:
        """Run ``call`` once and return its result and its seconds."""
        results: list[object] = []
        seconds = self._seconds(lambda: results.append(call()), 1, _USUAL_LAUNCH_SECONDS)
        return results[0], seconds

    def _launch_seconds(self, call: Call) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def _seconds(self, call: Call, repeats: int, launch_seconds: float) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self._device):
            # Public in all but name: torch's own benchmarks pause a stream with it (2.11, 2.13).
            pause_seconds = _USUAL_LAUNCH_SECONDS + repeats * launch_seconds * self._PAUSE_MARGIN
            keep_gpu_busy(int(min(pause_seconds, self._LONGEST_PAUSE_SECONDS) * self._cycles_per_second))
            begin.record()
            for _ in range(repeats):
                call()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeats


Clock: TypeAlias = HostClock | CudaClock


def clock_for(device: torch.device) -> Clock:
    """Return the clock for ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
