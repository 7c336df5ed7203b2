"""When offloaded values leave the device and come back: the engine's rules (``runtime.offloading``), as arithmetic.

Values are numbered in the order in which they leave. At most a window of bytes is on its way at a time.

- *Leaving.* A value begins to leave when it is made. Its memory is let go of when those that left after it would
  otherwise be more than the window, or when the forward pass ends.
- *Coming back.* A value is fetched when it is first read, unless it is on its way by then. Each first read also starts
  the ones that left before it, the latest first, for as long as what is on its way and not yet read fits the window.

Nothing depends on how fast copies are, so that memory is known to the byte beforehand; who comes too early, waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Offloading(NamedTuple):
    """The values to offload, at most one of each op, and how many of their bytes may be on their way at a time."""

    values: frozenset[int]
    window_bytes: int


NOTHING_OFFLOADED = Offloading(frozenset(), 0)


def numbers_let_go(sizes: Sequence[int], window_bytes: int) -> list[list[int]]:
    """Return, for each value that leaves, which ones are let go of then, and last which when the forward pass ends."""
    let_go: list[list[int]] = []
    first, bytes_leaving = 0, 0
    for number, num_bytes in enumerate(sizes):
        bytes_leaving += num_bytes
        begin = first
        while bytes_leaving > window_bytes:
            bytes_leaving -= sizes[first]
            first += 1
        let_go.append(list(range(begin, first)))
        assert first <= number + 1
    return [*let_go, list(range(first, len(sizes)))]


def numbers_started(first_reads: Sequence[int], sizes: Sequence[int], window_bytes: int) -> list[list[int]]:
    """Return, for each first read, whose copies it starts; that of the value itself, where it must, comes first."""
    started: list[list[int]] = []
    is_waiting = [False] * len(sizes)
    for number in first_reads:
        is_waiting[number] = True
    bytes_ahead = 0
    for number in first_reads:
        now: list[int] = []
        if is_waiting[number]:
            now.append(number)
            is_waiting[number] = False
        else:
            bytes_ahead -= sizes[number]
        for other in range(number - 1, -1, -1):
            if not is_waiting[other]:
                continue
            if bytes_ahead + sizes[other] > window_bytes:
                break
            bytes_ahead += sizes[other]
            is_waiting[other] = False
            now.append(other)
        started.append(now)
    return started
