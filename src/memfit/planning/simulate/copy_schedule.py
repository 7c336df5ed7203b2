"""When the copies of a plan's offloaded values run: `offload_rules`, at the positions of a walk through the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.graph.model_profile import Link
from memfit.planning.step import Step
from memfit.planning.step.link_time import Arrival, Copies, Departure, Waiting, expected_waiting
from memfit.planning.step.offload_rules import numbers_let_go, numbers_started

Numbers = npt.NDArray[np.int64]


class Runs(NamedTuple):
    """The recipes that run, in order: for which read, by its rank, at which position; which value is fetched, or -1."""

    ranks: Numbers
    positions: Numbers
    fetched: Numbers


class CopySchedule:
    """The copies of offloaded values, which are ``sent`` in this order.

    ``leaves_until`` is the last position at which a value still has the memory that it was made in, ``arrives_from``
    the first at which it has memory again.
    """

    def __init__(
        self, step: Step, sent: Sequence[int], window_bytes: int, runs: Runs, position_of_op: Sequence[int]
    ) -> None:
        self.leaves_until: dict[int, int] = {}
        self.arrives_from: dict[int, int] = {}
        self._position_of_op = position_of_op
        self._close_time = step.close_time
        self._sent = [(step.value_op[value], value) for value in sent]
        self._sizes = [step.value_bytes[value] for _, value in self._sent]
        self._let_go = numbers_let_go(self._sizes, window_bytes)
        self._schedule_departures()
        self._schedule_arrivals(runs, window_bytes)

    def _schedule_departures(self) -> None:
        times = [*(op for op, _ in self._sent), self._close_time]
        for time, let_go in zip(times, self._let_go, strict=True):
            for number in let_go:
                self.leaves_until[self._sent[number][1]] = self._position_of_op[time]

    def _schedule_arrivals(self, runs: Runs, window_bytes: int) -> None:
        # The runs of one read are in a row: where they begin, and which values come back for it, and where.
        first_runs = np.flatnonzero(np.diff(runs.ranks, prepend=-1))
        begins: list[int] = runs.positions[first_runs].tolist()
        fetches: list[list[tuple[int, int]]] = [[] for _ in begins]
        fetching = np.flatnonzero(runs.fetched >= 0)
        reads = np.searchsorted(first_runs, fetching, side="right") - 1
        described = np.stack([reads, runs.positions[fetching], runs.fetched[fetching]], axis=1)
        for read, position, number in described.tolist():
            fetches[read].append((position, number))
        started = numbers_started([[number for _, number in of_read] for of_read in fetches], self._sizes, window_bytes)
        # Position, whose copies are started there, and which are waited for after that.
        self._arrivals: list[tuple[int, list[int], list[int]]] = []
        for begin, of_read, (ahead, late) in zip(begins, fetches, started, strict=True):
            if ahead:
                self._arrivals.append((begin, ahead, []))
            for fetched_at, number in of_read:
                self._arrivals.append((fetched_at, [number] if number in late else [], [number]))
        for position, numbers, _ in self._arrivals:
            for number in numbers:
                self.arrives_from[self._sent[number][1]] = position

    def waiting(self, link: Link, elapsed: Sequence[float], unthrottled_share: float) -> Waiting:
        """Return how much longer the device takes, which has computed for ``elapsed`` seconds before each position, and
        for the last of them in all.
        """
        departures = [
            Departure(elapsed[self._position_of_op[op] + 1], num_bytes, let_go)
            for (op, _), num_bytes, let_go in zip(self._sent, self._sizes, self._let_go[:-1], strict=True)
        ]
        forward_seconds = elapsed[self._position_of_op[self._close_time] + 1]
        arrivals = [Arrival(elapsed[position], started, awaited) for position, started, awaited in self._arrivals]
        return expected_waiting(link, Copies(departures, forward_seconds, arrivals, elapsed[-1]), unthrottled_share)
