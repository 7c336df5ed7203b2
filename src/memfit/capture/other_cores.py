"""Other cores of the host than those that a process runs on just now.

On a shared host a core may be at half of its speed for seconds, because a neighbour uses its other half, and the
scheduler, which cannot know, leaves a busy thread where it is. What was measured on several cores, one after the other,
is not a matter of which one it happened to be.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Of the fields of /proc/PID/task/TID/stat after the name, which may hold anything: the core that it last ran on.
_PROCESSOR_FIELD = 36


@contextmanager
def other_cores() -> Iterator[None]:
    """Keep each thread of this process from the core that it last ran on; afterwards, all may run where they might.

    Where the platform does not tell or does not allow that, and where a thread has but one core, nothing happens.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = _allowed_cores()
    whole: dict[frozenset[int], set[int]] = {}
    for thread, cores in allowed.items():
        others = cores - _last_cores(thread)
        if others != cores and others:
            whole[frozenset(others)] = cores
            _allow(thread, others)
    try:
        yield
    finally:
        for thread, cores in _allowed_cores().items():
            # A thread that began meanwhile took over what the one that began it was left with.
            before = allowed.get(thread) or whole.get(frozenset(cores))
            if before is not None and before != cores:
                _allow(thread, before)


def _threads() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir("/proc/self/task")]
    return []


def _allowed_cores() -> dict[int, set[int]]:
    allowed = {}
    for thread in _threads():
        # It may have ended in between.
        with suppress(OSError):
            allowed[thread] = os.sched_getaffinity(thread)
    return allowed


def _last_cores(thread: int) -> set[int]:
    """Return the core that the thread last ran on, or none where that is not told."""
    with suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/self/task/{thread}/stat").read_text(encoding="utf-8", errors="replace")
        return {int(stat.rpartition(")")[2].split()[_PROCESSOR_FIELD])}
    return set()


def _allow(thread: int, cores: set[int]) -> None:
    with suppress(OSError):
        os.sched_setaffinity(thread, cores)
