"""When the copies of a plan's offloaded values run: `offload_rules`, at the positions of a walk through the step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from memfit.graph.model_profile import Link
from memfit.planning.step import Step
from memfit.planning.step.link_time import Arrival, Copies, Departure, expected_waiting
from memfit.planning.step.offload_rules import numbers_freed, numbers_started
from memfit.planning.step.seconds import Seconds

Run = tuple[int, int, int]
"""Something that is restored: for which read, by its rank, at which position, and which offloaded value, or -1."""


class CopySchedule:
    """The copies of offloaded values, which are ``sent`` in this order.

    ``leaves_until`` is the last position at which a value still has the memory that it was made in, ``arrives_from``
    the first at which it has memory again.
    """

    def __init__(
        self, step: Step, sent: Sequence[int], window_bytes: int, runs: Sequence[Run], position_of_op: Sequence[int]
    ) -> None:
        self._position_of_op, self._close_time = position_of_op, step.close_time
        self._made_at = [step.value_op[value] for value in sent]
        self._sizes = [step.value_bytes[value] for value in sent]
        self._freed = numbers_freed(self._sizes, window_bytes)
        times = [*self._made_at, self._close_time]
        self.leaves_until = {
            sent[number]: position_of_op[time]
            for time, freed in zip(times, self._freed, strict=True)
            for number in freed
        }
        reads = [list(of_read) for _, of_read in groupby(runs, key=itemgetter(0))]
        fetches = [[number for _, _, number in of_read if number >= 0] for of_read in reads]
        # Position, whose copies are started there, and which are waited for after that.
        self._arrivals: list[tuple[int, list[int], list[int]]] = []
        for of_read, (ahead, late) in zip(reads, numbers_started(fetches, self._sizes, window_bytes), strict=True):
            if ahead:
                self._arrivals.append((of_read[0][1], ahead, []))
            for _, position, number in of_read:
                if number >= 0:
                    self._arrivals.append((position, [number] if number in late else [], [number]))
        self.arrives_from = {sent[number]: position for position, numbers, _ in self._arrivals for number in numbers}

    def waiting(self, link: Link, elapsed: Sequence[float], unthrottled_share: float) -> Seconds:
        """Return how much longer the device takes.

        It has computed for ``elapsed`` seconds before each position, and for the last of them in all.
        """
        departures = [
            Departure(elapsed[self._position_of_op[op] + 1], num_bytes, freed)
            for op, num_bytes, freed in zip(self._made_at, self._sizes, self._freed[:-1], strict=True)
        ]
        forward_seconds = elapsed[self._position_of_op[self._close_time] + 1]
        arrivals = [Arrival(elapsed[position], started, awaited) for position, started, awaited in self._arrivals]
        return expected_waiting(link, Copies(departures, forward_seconds, arrivals, elapsed[-1]), unthrottled_share)
