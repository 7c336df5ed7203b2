"""Pins a process to cores of the host while a GPU is measured, so that its threads do not migrate between steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def pinned(device: torch.device, num_cores: int = 2) -> Iterator[None]:
    """Run all threads on one core, or this thread on one and all others on a second.

    Forward passes are launched by this thread, backward passes by another one, which autograd starts. Nothing is done
    where the device is the CPU, which computes on all of its cores, or where the platform cannot pin.
    """
    if device.type == "cpu" or sys.platform != "linux":
        yield
        return
    allowed = os.sched_getaffinity(0)
    # Far apart in the numbering: neighbours are often two threads of one core.
    cores = sorted(allowed)
    first, second = cores[0], cores[len(cores) // 2] if num_cores > 1 else cores[0]
    _put_on({second}, _threads())
    os.sched_setaffinity(0, {first})
    try:
        yield
    finally:
        _put_on(allowed, _threads())


def _threads() -> Iterator[int]:
    return map(int, os.listdir("/proc/self/task"))


def _put_on(cores: set[int], threads: Iterable[int]) -> None:
    for thread in threads:
        # It may have ended since it was listed.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cores)
