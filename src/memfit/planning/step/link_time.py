"""How long a step waits for copies between the device and the host.

Copies run beside the computing, one after the other in each direction. The device waits where it lets go of memory that
is still being copied out, and where it reads what has not come back yet; and it computes a little longer while it
copies. A device that waits rests, and computes the faster in between: what it is short of is power
(``capture.in_step``).

Plans count with nine tenths of the measured rates. Plans that need all of the link wait at every hitch of it: on an
H200, those for GPT-2048 took up to 2.5 hundredths of the step longer than they were predicted to at its full rate
(``benchmarks/results/frontier-h200-other-runs/gpt-2048-whole-link.json``). But no more is counted for hitches than
that: where the link is what takes the time, it is as fast as it was measured to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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


class Waiting(NamedTuple):
    """For how long the device waits in the forward pass and after it, and computes longer."""

    forward: float
    backward: float


NO_WAITING = Waiting(0.0, 0.0)


class Copies(NamedTuple):
    """The copies of a step in which the device computes for ``computing_seconds``.

    What was not let go of before is when the device has computed for ``forward_seconds``.
    """

    departures: Sequence[Departure]
    forward_seconds: float
    arrivals: Sequence[Arrival]
    computing_seconds: float


COUNTED_SHARE = 0.9
"""How much of the measured rates plans count with."""

# What hitches cost at most, as a share of what the device computes for.
_HITCHES_SHARE = 0.015
# From this share of the step on that it waits for, a device draws so little power that its clocks are at their highest:
# at 1.1 times the clocks, about 1.25 times the power, and a third of it when it waits.
_RESTED_FROM = 0.25


def with_reserve(link: Link) -> Link:
    """Return the link that plans count with."""
    out, back = COUNTED_SHARE * link.out_bytes_per_second, COUNTED_SHARE * link.back_bytes_per_second
    return replace(link, out_bytes_per_second=out, back_bytes_per_second=back)


def out_seconds(link: Link, num_bytes: int) -> float:
    """Return how long a copy out of the device takes."""
    return link.seconds_per_copy + num_bytes / link.out_bytes_per_second


def back_seconds(link: Link, num_bytes: int) -> float:
    """Return how long a copy back takes."""
    return link.seconds_per_copy + num_bytes / link.back_bytes_per_second


def expected_waiting(link: Link, copies: Copies, unthrottled_share: float) -> Waiting:
    """Return how much longer the device takes because of the copies.

    ``unthrottled_share`` is what computing takes on a device that rests in between (`ModelProfile.unthrottled_share`).
    """
    cautious = waiting_for(with_reserve(link), copies)
    waiting, hitches = sum(cautious), _HITCHES_SHARE * copies.computing_seconds
    if waiting <= 0:
        return NO_WAITING
    if waiting > hitches:
        waiting = min(waiting, sum(waiting_for(link, copies)) + hitches)
    waiting -= _gained_by_resting(waiting, copies.computing_seconds, unthrottled_share)
    in_forward = waiting * cautious.forward / sum(cautious)
    return Waiting(in_forward, waiting - in_forward)


def _gained_by_resting(waiting: float, computing: float, unthrottled_share: float) -> float:
    """Return what a device that computes for ``computing`` seconds without a break gains by waiting for so long."""
    waiting_share = waiting / (waiting + computing)
    return min((1 - unthrottled_share) * computing * min(waiting_share / _RESTED_FROM, 1.0), waiting)


def waiting_for(link: Link, copies: Copies) -> Waiting:
    """Return for how long the device waits, at the link's full rates. Its own seconds count without that."""
    departures, forward_seconds, arrivals, _ = copies
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
    in_forward = delay
    free_at = 0.0
    back_at: dict[int, float] = {}
    for arrival in arrivals:
        for number in arrival.started:
            now = arrival.at_seconds + delay
            free_at = max(now, free_at) + back_seconds(link, sizes[number])
            back_at[number] = free_at
        for number in arrival.awaited:
            delay = max(delay, back_at[number] - arrival.at_seconds)
    copying_out = sum(out_seconds(link, num_bytes) for num_bytes in sizes)
    copying_back = sum(back_seconds(link, num_bytes) for num_bytes in sizes)
    return Waiting(in_forward + link.slowdown * copying_out, delay - in_forward + link.slowdown * copying_back)
