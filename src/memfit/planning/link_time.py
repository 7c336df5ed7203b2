"""How long a step waits for copies between the device and the host.

Copies run beside the computing, one after the other in each direction. The device waits where it lets go of memory that
is still being copied out, and where it reads what has not come back yet; and it computes a little longer while it
copies.

Plans count with nine tenths of the measured rates. Plans that need all of the link wait at every hitch of it: on an
H200, those for GPT-2048 took up to 2.5 hundredths of the step longer than they were predicted to at its full rate
(``benchmarks/results/frontier-h200-other-runs/gpt-2048-whole-link.json``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memfit.graph.model_profile import Link


class Departure(NamedTuple):
    """A value that leaves when the device has computed for ``at_seconds``; memory of others is let go of then."""

    at_seconds: float
    num_bytes: int
    let_go: Sequence[int]


class Arrival(NamedTuple):
    """Copies back that are started when the device has computed for ``at_seconds``, and what is then waited for."""

    at_seconds: float
    started: Sequence[int]
    awaited: Sequence[int] = ()


COUNTED_SHARE = 0.9
"""How much of the measured rates plans count with."""


def out_seconds(link: Link, num_bytes: int) -> float:
    """Return how long a copy out of the device takes."""
    return link.seconds_per_copy + num_bytes / (COUNTED_SHARE * link.out_bytes_per_second)


def back_seconds(link: Link, num_bytes: int) -> float:
    """Return how long a copy back takes."""
    return link.seconds_per_copy + num_bytes / (COUNTED_SHARE * link.back_bytes_per_second)


def waiting_seconds(
    link: Link, departures: Sequence[Departure], forward_seconds: float, arrivals: Sequence[Arrival]
) -> float:
    """Return for how long the device waits in all, and computes longer. Its own seconds count without that.

    What was not let go of before is when the device has computed for ``forward_seconds``.
    """
    sizes = [departure.num_bytes for departure in departures]
    delay, free_at = 0.0, 0.0
    ended_at: list[float] = []
    for departure in departures:
        now = departure.at_seconds + delay
        free_at = max(now, free_at) + out_seconds(link, departure.num_bytes)
        ended_at.append(free_at)
        for number in departure.let_go:
            delay = max(delay, ended_at[number] - departure.at_seconds)
    # Copies end in the order in which they began.
    delay = max(delay, free_at - forward_seconds) if ended_at else delay
    free_at = 0.0
    back_at: dict[int, float] = {}
    for arrival in arrivals:
        for number in arrival.started:
            now = arrival.at_seconds + delay
            free_at = max(now, free_at) + back_seconds(link, sizes[number])
            back_at[number] = free_at
        for number in arrival.awaited:
            delay = max(delay, back_at[number] - arrival.at_seconds)
    copying = sum(out_seconds(link, num_bytes) + back_seconds(link, num_bytes) for num_bytes in sizes)
    return delay + link.slowdown * copying
