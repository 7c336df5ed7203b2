"""How long a step waits for copies between the device and the host.

Copies run beside the computation, one after the other in each direction. The device waits where it frees memory that is
still being copied to the host, and where it reads what is not back yet; and it computes a little longer while it
copies. A device that waits draws less power, and computes faster afterwards (`ModelProfile.unthrottled_share`).

Plans count with nine tenths of the measured rates. Plans that need all of the link wait at every hitch of it: on an
H200, those for GPT-2048 took up to 2.5 hundredths of the step longer than predicted at its full rate. But no more than
that is counted for hitches: where the link is what takes the time, it is as fast as it was measured to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from memfit.graph.model_profile import Link
from memfit.planning.step.seconds import NONE, Seconds


class Departure(NamedTuple):
    """A value whose copy starts when the device has computed for ``at_seconds``; memory of others is freed then."""

    at_seconds: float
    num_bytes: int
    freed: Sequence[int]


class Arrival(NamedTuple):
    """Copies back that are started when the device has computed for ``at_seconds``, and what is then waited for."""

    at_seconds: float
    started: Sequence[int]
    awaited: Sequence[int] = ()


class Copies(NamedTuple):
    """The copies of a step in which the device computes for ``computing_seconds``.

    Memory that was not freed before is when the device has computed for ``forward_seconds``.
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
    """Return how long a copy to the host takes."""
    return link.seconds_per_copy + num_bytes / link.out_bytes_per_second


def expected_waiting(link: Link, copies: Copies, unthrottled_share: float) -> Seconds:
    """Return how much longer the device takes because of the copies."""
    cautious = waiting_for(with_reserve(link), copies)
    waiting, hitches = sum(cautious), _HITCHES_SHARE * copies.computing_seconds
    if waiting <= 0:
        return NONE
    if waiting > hitches:
        waiting = min(waiting, sum(waiting_for(link, copies)) + hitches)
    # What the device gains by resting, which is never more than it waits for.
    waiting_share = waiting / (waiting + copies.computing_seconds)
    gained = (1 - unthrottled_share) * copies.computing_seconds * min(waiting_share / _RESTED_FROM, 1.0)
    waiting -= min(gained, waiting)
    in_forward = waiting * cautious.forward / sum(cautious)
    return Seconds(in_forward, waiting - in_forward)


def waiting_for(link: Link, copies: Copies) -> Seconds:
    """Return for how long the device waits, at the link's full rates. Its own seconds count without that."""
    sizes = [departure.num_bytes for departure in copies.departures]
    copying_out = [link.seconds_per_copy + num_bytes / link.out_bytes_per_second for num_bytes in sizes]
    copying_back = [link.seconds_per_copy + num_bytes / link.back_bytes_per_second for num_bytes in sizes]
    delay, free_at = 0.0, 0.0
    out_until: list[float] = []
    for (at_seconds, _, freed), seconds in zip(copies.departures, copying_out, strict=True):
        free_at = max(at_seconds + delay, free_at) + seconds
        out_until.append(free_at)
        for number in freed:
            delay = max(delay, out_until[number] - at_seconds)
    # Copies end in the order in which they began.
    in_forward = delay = max(delay, free_at - copies.forward_seconds) if sizes else delay
    free_at, back_at = 0.0, [0.0] * len(sizes)
    for at_seconds, started, awaited in copies.arrivals:
        for number in started:
            back_at[number] = free_at = max(at_seconds + delay, free_at) + copying_back[number]
        for number in awaited:
            delay = max(delay, back_at[number] - at_seconds)
    slower_forward, slower_backward = link.slowdown * sum(copying_out), link.slowdown * sum(copying_back)
    return Seconds(in_forward + slower_forward, delay - in_forward + slower_backward)
