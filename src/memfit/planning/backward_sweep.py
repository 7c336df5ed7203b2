"""The least peak, or the least seconds within a budget, by dynamic programming over the ops of the forward pass.

The last op comes first. Partial plans (`sweep_rows`) of one state have the same future. So of two of them, one can be
forgotten that needs no less memory anywhere, and no fewer seconds, than the other. Before that is looked at, the times
of the step are merged between which nothing that is yet to be decided on can begin or end: only the most that is live
in such a zone matters, and of zones there are few. With all rows kept that are not beaten so, what is found is exact.

Prices on memory (`state_graph`) tell what each partial plan has yet to pay at least, whatever is decided for the rest:
a *guide*. What cannot become better than what is known is forgotten too; and where there are more rows than allowed,
the most promising stay. The least that any of the others promised is then what is proven.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.planning.state_graph import Numbers, StateGraph
from memfit.planning.sweep_rows import Decisions, Rows, joined
from memfit.planning.sweep_timeline import GAP, NOBODY, Ints, SweepTimeline

# What floating point may add to the sums of guides, as a share of them.
_ROUNDING = 1e-9
# Of the rows that are kept for their seconds, how many are kept for being small.
_SHARE_OF_SMALL = 0.25
# Comparing takes time, which is worth it where there are many: a share of the most.
_SHARE_NOT_COMPARED = 0.5
# How many rows are compared with those known to be good at a time.
_NUM_COMPARED = 64


@dataclass(frozen=True, slots=True)
class Guide:
    """Prices for a byte at each of the graph's times, beside a weight for seconds; for the least peak it is 0."""

    prices: Numbers
    seconds_weight: float


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, with its peak and seconds as the sweep counts them."""

    dropped: frozenset[int]
    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Swept:
    """The plans that none beats in both peak and seconds, or in peak, the smallest first, of those that were kept.

    Every plan within what was asked for has at least ``least``: seconds, or bytes of the peak where those are looked
    for. ``is_complete`` says that no row was forgotten for want of room.
    """

    found: list[Found]
    least: float
    is_complete: bool


def swept(
    timeline: SweepTimeline,
    limit_bytes: int,
    *,
    by_seconds: bool,
    most_rows: int,
    most_seconds: float = math.inf,
    graph: StateGraph | None = None,
    guides: Sequence[Guide] = (),
) -> Swept:
    """Return plans within the limit of bytes, and within the seconds where those count."""
    sweep = _Sweep(timeline, limit_bytes, by_seconds, most_rows, most_seconds)
    if graph is not None:
        sweep.follow(graph, guides)
    return sweep.run()


class _Promises(NamedTuple):
    """By row: the least peak and seconds of what comes of it, and whether those are within what is asked for."""

    peaks: Numbers
    seconds: Numbers
    is_possible: npt.NDArray[np.bool_]

    def taken(self, which: Ints) -> _Promises:
        return _Promises(self.peaks[which], self.seconds[which], self.is_possible[which])


class _Sweep:
    def __init__(
        self, timeline: SweepTimeline, limit_bytes: int, by_seconds: bool, most_rows: int, most_seconds: float
    ) -> None:
        self._timeline = timeline
        self._decisions = Decisions(timeline)
        self._limit_bytes = limit_bytes
        self._by_seconds = by_seconds
        self._most_rows = most_rows
        self._most_seconds = most_seconds
        self._graph: StateGraph | None = None
        self._guides: Sequence[Guide] = ()
        self._least = math.inf
        # Columns behind these are alike in all rows, and made when something reaches them.
        self._num_made = 1
        memory = timeline.first_memory[None, :1].copy()
        self._rows = Rows(timeline.keys[:1], timeline.kinds[:1], memory, np.zeros(1))
        # For each op: the row each row came from, which choice it made, and the choices.
        self._history: list[tuple[Ints, Ints, list[tuple[int, ...]]]] = []

    def follow(self, graph: StateGraph, guides: Sequence[Guide]) -> None:
        """Judge rows by what they have yet to pay."""
        self._graph, self._guides = graph, guides
        self._remaining = [graph.cheapest(guide.prices, guide.seconds_weight).remaining for guide in guides]
        self._guide_keys: Ints = np.array([self._timeline.op_key(time) for time in graph.times], dtype=np.int64)
        self._guide_columns: Ints = np.array([self._timeline.column_of_op(time) for time in graph.times])

    def run(self) -> Swept:
        timeline, decisions = self._timeline, self._decisions
        is_real = timeline.kinds != GAP
        if timeline.first_memory[is_real].max(initial=0) > self._limit_bytes:
            return self._result([])
        for number, op in enumerate(timeline.ops_to_decide()):
            decisions.begin(self._rows, op)
            self._reach(decisions.last_key(self._rows, op))
            choices = decisions.choices(op)
            parts = [decisions.decided(self._rows, op, dropped) for dropped in choices]
            choice = np.repeat(np.arange(len(parts)), [part.num_rows for part, _ in parts])
            self._rows = joined([part for part, _ in parts])
            self._history.append((np.concatenate([which for _, which in parts]), choice, choices))
            decisions.finish(self._rows, op)
            self._keep(np.flatnonzero(self._is_within()))
            if not self._rows.num_rows:
                return self._result([])
            self._merge_columns(op)
            self._keep_most_promising(number, op)
            if not self._rows.num_rows:
                return self._result([])
        self._reach(timeline.end_key)
        decisions.copy_what_was_there_before(self._rows)
        self._keep(np.flatnonzero(self._is_within()))
        return self._result(self._plans())

    def _result(self, found: list[Found]) -> Swept:
        is_complete = self._least == math.inf
        beyond = self._most_seconds if self._by_seconds else self._limit_bytes + 1
        best = min((plan.seconds if self._by_seconds else plan.peak_bytes for plan in found), default=math.inf)
        return Swept(found, min(self._least, best, beyond), is_complete)

    def _reach(self, key: int) -> None:
        """Have columns up to a key."""
        timeline, rows, made = self._timeline, self._rows, self._num_made
        num_reached = int(np.searchsorted(timeline.keys, key, side="right"))
        if num_reached > made:
            rows.keys = np.concatenate([rows.keys, timeline.keys[made:num_reached]])
            rows.kinds = np.concatenate([rows.kinds, timeline.kinds[made:num_reached]])
            more = np.broadcast_to(timeline.first_memory[made:num_reached], (rows.num_rows, num_reached - made))
            rows.memory = np.concatenate([rows.memory, more], axis=1)
            self._num_made = num_reached

    def _keep(self, which: Ints) -> None:
        if len(which) < self._rows.num_rows:
            self._rows = self._rows.taken(which)
            if self._history:
                before, choice, choices = self._history[-1]
                self._history[-1] = before[which], choice[which], choices

    def _is_within(self) -> npt.NDArray[np.bool_]:
        is_within: npt.NDArray[np.bool_] = self._rows.peaks() <= self._limit_bytes
        return is_within & (self._rows.seconds <= self._most_seconds) if self._by_seconds else is_within

    def _merge_columns(self, op: int) -> None:
        """Take together what lies between any two keys at which something can still begin or end."""
        rows, per_slot = self._rows, self._timeline.keys_per_slot
        cuts, slots = self._timeline.events_before(op, int(rows.keys[-1]))
        for asked in rows.asked.values():
            slots.update(np.unique(asked).tolist())
        slots.discard(NOBODY)
        for ends in rows.end_keys():
            cuts.update((np.unique(ends) + 1).tolist())
        for slot in slots:
            cuts.update(self._timeline.borders_of_slot(slot, op))
        is_gap = rows.kinds == GAP
        is_needed = is_gap & np.isin(rows.keys // per_slot, list(slots))
        real = np.flatnonzero(~is_gap)
        zone_starts = _zone_starts(cuts, rows.keys[real])
        if len(zone_starts) == len(real) and is_needed.sum() == is_gap.sum():
            return
        last_of_zone = real[np.append(zone_starts[1:], len(real)) - 1]
        memory = np.maximum.reduceat(rows.memory[:, real], zone_starts, axis=1)
        keys = np.concatenate([rows.keys[last_of_zone], rows.keys[is_needed]])
        kinds = np.concatenate([rows.kinds[last_of_zone], rows.kinds[is_needed]])
        order = np.argsort(keys, kind="stable")
        rows.keys, rows.kinds = keys[order], kinds[order]
        rows.memory = np.concatenate([memory, rows.memory[:, is_needed]], axis=1)[:, order]

    def _unbeaten(self, op: int) -> Ints:
        """Return the rows that none of the same state beats, with zones as the ops to come see them from that state."""
        rows, per_slot = self._rows, self._timeline.keys_per_slot
        states = rows.states(with_runs=True)
        order = np.argsort(states, kind="stable")
        borders = np.flatnonzero(np.append(states[order][1:] != states[order][:-1], True)) + 1
        if len(borders) == rows.num_rows:
            return np.arange(rows.num_rows)
        real = np.flatnonzero(rows.kinds != GAP)
        certain_cuts, certain_slots = self._timeline.events_before(op, int(rows.keys[-1]))
        for slot in certain_slots:
            certain_cuts.update(self._timeline.borders_of_slot(slot, op))
        certain_starts = _zone_starts(certain_cuts, rows.keys[real])
        gap_columns = np.flatnonzero(rows.kinds == GAP)
        gap_of_slot = dict(zip((rows.keys[gap_columns] // per_slot).tolist(), gap_columns.tolist(), strict=True))
        kept: list[Ints] = []
        for start, end in zip([0, *borders[:-1].tolist()], borders.tolist(), strict=True):
            which = order[start:end]
            if len(which) == 1:
                kept.append(which)
                continue
            one = int(which[0])
            slots = {int(asked[one]) for asked in rows.asked.values()} - {NOBODY}
            cuts = {int(ends[one]) + 1 for ends in rows.end_keys()}
            for slot in slots:
                cuts.update(self._timeline.borders_of_slot(slot, op))
            own_starts = np.searchsorted(rows.keys[real], list(cuts)) if cuts else certain_starts
            zone_starts = np.unique(np.concatenate([certain_starts, own_starts[own_starts < len(real)]]))
            gaps = [gap_of_slot[slot] for slot in sorted(slots | certain_slots) if slot in gap_of_slot]
            parts = [
                np.maximum.reduceat(rows.memory[np.ix_(which, real)], zone_starts, axis=1),
                rows.memory[np.ix_(which, gaps)],
                *(memory[which, None] for _, memory in rows.runs.values()),
            ]
            criteria = np.concatenate(parts, axis=1).astype(np.float64)
            criteria = criteria[:, (criteria != criteria[0]).any(axis=0)]
            if self._by_seconds:
                criteria = np.concatenate([criteria, rows.seconds[which, None]], axis=1)
            kept.append(which[_best(criteria)])
        return np.sort(np.concatenate(kept))

    def _keep_most_promising(self, level_number: int, op: int) -> None:
        promises = self._promises(level_number)
        self._keep(which := np.flatnonzero(promises.is_possible))
        promises = promises.taken(which)
        if self._rows.num_rows > self._most_rows * _SHARE_NOT_COMPARED:
            self._keep(which := self._unbeaten(op))
            promises = promises.taken(which)
        if self._rows.num_rows > self._most_rows:
            promised = promises.seconds if self._by_seconds else promises.peaks
            order = np.argsort(promised, kind="stable")
            num_small = int(self._most_rows * _SHARE_OF_SMALL) if self._by_seconds else 0
            first, others = order[: self._most_rows - num_small], order[self._most_rows - num_small :]
            # The fastest so far are often those that will not fit.
            is_small = np.argsort(promises.peaks[others], kind="stable")
            self._least = min(self._least, float(promised[others[np.sort(is_small[num_small:])[0]]]))
            self._keep(np.sort(np.concatenate([first, others[is_small[:num_small]]])))

    def _promises(self, level_number: int) -> _Promises:
        """Return what each row comes to at least, and whether that is within what is asked for."""
        rows, first_memory = self._rows, self._timeline.first_memory
        promises = _Promises(rows.peaks().astype(np.float64), rows.seconds, np.ones(rows.num_rows, dtype=bool))
        if self._graph is None:
            return promises
        peaks, seconds = promises.peaks, promises.seconds
        at = np.searchsorted(self._graph.levels[level_number].states, rows.states())
        is_made = self._guide_columns < self._num_made
        real = np.flatnonzero(rows.kinds != GAP)
        memory = rows.memory[:, real[np.searchsorted(rows.keys[real], self._guide_keys[is_made])]]
        for guide, remaining in zip(self._guides, self._remaining, strict=True):
            prices, weight = guide.prices, guide.seconds_weight
            rest = float(prices[~is_made] @ first_memory[self._guide_columns[~is_made]])
            # Rounding must not decide.
            allowed = float(prices.sum()) * self._limit_bytes
            paid = memory @ prices[is_made] + rest + remaining[level_number + 1][at] - _ROUNDING * allowed
            if weight:
                # What is paid for the bytes of the budget itself is not paid in seconds.
                seconds = np.maximum(seconds, rows.seconds + (paid - allowed) / weight)
            else:
                peaks = np.maximum(peaks, paid / float(prices.sum()))
        is_fast_enough = seconds <= self._most_seconds if self._by_seconds else True
        return _Promises(peaks, seconds, (peaks <= self._limit_bytes) & is_fast_enough)

    def _plans(self) -> list[Found]:
        """Return the plans of the rows that none beats, the smallest first."""
        rows = self._rows
        if not rows.num_rows:
            return []
        peaks = rows.peaks()
        plans: list[Found] = []
        for row in np.lexsort((rows.seconds, peaks)).tolist():
            if not plans or (self._by_seconds and rows.seconds[row] < plans[-1].seconds):
                plans.append(Found(self._dropped(row), int(peaks[row]), float(rows.seconds[row])))
        return plans

    def _dropped(self, row: int) -> frozenset[int]:
        dropped: set[int] = set()
        for before, choice, choices in reversed(self._history):
            dropped.update(choices[int(choice[row])])
            row = int(before[row])
        return frozenset(dropped)


def _zone_starts(cuts: set[int], keys: Ints) -> Ints:
    """Return the positions of the keys before which there is a cut."""
    zones = np.searchsorted(np.array(sorted(cuts), dtype=np.int64), keys, side="right")
    return np.flatnonzero(np.append(True, zones[1:] != zones[:-1]))


def _best(criteria: Numbers) -> Ints:
    """Return the rows that no other is at least as good as everywhere; of equal ones, the first."""
    if len(criteria) <= _NUM_COMPARED:
        return np.flatnonzero(~_is_beaten_within(criteria))
    low, high = criteria.min(axis=0), criteria.max(axis=0)
    # A row that beats another has the smaller sum.
    order = np.argsort(((criteria - low) / np.maximum(high - low, 1e-300)).sum(axis=1), kind="stable")
    kept: list[Ints] = []
    good = criteria[:0]
    for start in range(0, len(order), _NUM_COMPARED):
        which = order[start : start + _NUM_COMPARED]
        is_beaten = np.any(np.all(good[None] <= criteria[which][:, None], axis=2), axis=1)
        which = which[~is_beaten]
        which = which[~_is_beaten_within(criteria[which])]
        kept.append(which)
        good = np.concatenate([good, criteria[which]])
    return np.concatenate(kept)


def _is_beaten_within(criteria: Numbers) -> npt.NDArray[np.bool_]:
    is_as_good: npt.NDArray[np.bool_] = np.all(criteria[:, None] <= criteria[None], axis=2)
    is_beaten: npt.NDArray[np.bool_] = np.any(is_as_good & (~is_as_good.T | np.triu(is_as_good, 1)), axis=0)
    return is_beaten
