"""When offloaded values leave the device and come back: the engine's rules (``runtime.offloading``), as arithmetic.

Values are numbered in the order in which they leave. At most a window of bytes is on its way at a time.

- *Leaving.* A value begins to leave when it is made. Its memory is let go of when those that left after it would
  otherwise be more than the window, or when the forward pass ends.
- *Coming back.* Whenever a dropped value is read that is not there, and before any recipe runs for it, values are
  started on their way back, the one that left last first, for as long as what is on its way and not yet read fits the
  window. A value whose turn to be read comes before that is started then.

Nothing depends on how fast copies are, so that memory is known to the byte beforehand; who comes too early, waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Offloading(NamedTuple):
    """The values to offload, and how many of their bytes may be on their way at a time."""

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


class Started(NamedTuple):
    """Whose copies are started before the recipes of one read run, and whose only when they are read themselves."""

    ahead: list[int]
    late: list[int]


def numbers_started(reads: Sequence[Sequence[int]], sizes: Sequence[int], window_bytes: int) -> list[Started]:
    """Return what each read that runs recipes starts, where ``reads`` tells which values come back for it."""
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
        late: list[int] = []
        for number in numbers:
            if is_waiting[number]:
                is_waiting[number] = False
                late.append(number)
            else:
                bytes_ahead -= sizes[number]
        started.append(Started(ahead, late))
    return started
