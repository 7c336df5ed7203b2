"""When copies of offloaded values start, and when memory is freed.

The rules are those of ``runtime.engine.offloading``, and described there. Values are numbered in the order in which
their copies to the host start. Nothing depends on how fast copies are, so that memory is known to the byte beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Offloading(NamedTuple):
    """The values to offload, and how many of their bytes may be copied at a time."""

    values: frozenset[int]
    window_bytes: int


NOTHING_OFFLOADED = Offloading(frozenset(), 0)


def numbers_freed(sizes: Sequence[int], window_bytes: int) -> list[list[int]]:
    """Return, for each value that is sent, which ones are freed then, and last which when the forward pass ends."""
    freed: list[list[int]] = []
    first, bytes_leaving = 0, 0
    for num_bytes in sizes:
        bytes_leaving += num_bytes
        begin = first
        while bytes_leaving > window_bytes:
            bytes_leaving -= sizes[first]
            first += 1
        freed.append(list(range(begin, first)))
    return [*freed, list(range(first, len(sizes)))]


class Started(NamedTuple):
    """Whose copies are started before the replays for one read, and whose only when they are read themselves."""

    ahead: list[int]
    late: list[int]


def numbers_started(reads: Sequence[Sequence[int]], sizes: Sequence[int], window_bytes: int) -> list[Started]:
    """Return what each read starts for which something is restored; ``reads`` has the values copied back for it."""
    is_waiting = [False] * len(sizes)
    for numbers in reads:
        for number in numbers:
            is_waiting[number] = True
    started: list[Started] = []
    bytes_ahead, highest = 0, len(sizes) - 1
    for numbers in reads:
        ahead: list[int] = []
        while highest >= 0 and not (is_waiting[highest] and bytes_ahead + sizes[highest] > window_bytes):
            if is_waiting[highest]:
                bytes_ahead += sizes[highest]
                is_waiting[highest] = False
                ahead.append(highest)
            highest -= 1
        late = [number for number in numbers if is_waiting[number]]
        bytes_ahead -= sum(sizes[number] for number in numbers if not is_waiting[number])
        for number in late:
            is_waiting[number] = False
        started.append(Started(ahead, late))
    return started
