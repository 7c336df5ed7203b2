"""The least peak, or the least seconds within a budget, by dynamic programming over the ops of the forward pass.

The last op comes first. Partial plans (`sweep_rows`) of one class (`sweep_classes`) have the same future. So of two of
them, one can be forgotten that needs no less memory anywhere, and no fewer seconds, than the other. With all rows kept
that are not beaten so, what is found is exact.

Where there are more rows than allowed, a *relaxed* sweep takes those together that need nearly the same. One of them
stands for all, with the least memory that any of them has in each zone, and the least seconds: whatever becomes of any
of them within a limit also becomes of that one. So the least peak, or the least seconds, that is found is one that no
plan can stay below, and the plan that is found with it may need more than was counted (after Bergman, Cire, van Hoeve
and Hooker, "Discrete Optimization with Decision Diagrams", 2016).

Prices on memory (`state_graph`) tell what each partial plan has yet to pay at least, whatever is decided for the rest:
a *guide*. What cannot become better than what is known is forgotten too. In sweeps that are not relaxed, or where there
are too many classes, the most promising rows stay; the least that any of the others promised is then what is proven.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.planning.dp.state_graph import Numbers, StateGraph
from memfit.planning.dp.sweep_classes import Classes
from memfit.planning.dp.sweep_classes import classes as classes_of
from memfit.planning.dp.sweep_rows import Decisions, Rows, hashed, joined
from memfit.planning.dp.sweep_timeline import GAP, NOBODY, Ints, SweepTimeline
from memfit.planning.dp.unbeaten import unbeaten

# What floating point may add to the sums of guides, as a share of them.
_ROUNDING = 1e-9
# Of the rows that are kept for their seconds, how many are kept for being small.
_SHARE_OF_SMALL = 0.25
# Comparing takes time, which is worth it where there are many: a share of the most, and no more than so many.
_SHARE_NOT_COMPARED, _MOST_NOT_COMPARED = 0.5, 60
# Rows are taken together if they are alike but for this share of the limit, or for so many times that, and so on.
_FINEST_UNIT, _UNIT_GROWTH, _MOST_COARSENESS = 2.0**-16, 1.25, 52
# What a row costs, as if there were so many values more to remember something about.
_TABLES_BESIDE = 4


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
    for. ``is_complete`` says that no row was forgotten for want of room, ``num_cells`` how much work it
    was: for each op its rows, times the values that they remember something about and a few more.
    """

    found: list[Found]
    least: float
    is_complete: bool
    num_cells: int


def swept(
    timeline: SweepTimeline,
    limit_bytes: int,
    *,
    by_seconds: bool,
    most_rows: int,
    most_seconds: float = math.inf,
    graph: StateGraph | None = None,
    guides: Sequence[Guide] = (),
    is_relaxed: bool = False,
) -> Swept:
    """Return plans within the limit of bytes, and within the seconds where those count.

    A relaxed sweep, which has no guides, may return a plan that is not within the limits.
    """
    sweep = _Sweep(timeline, limit_bytes, by_seconds, most_rows, most_seconds, is_relaxed)
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
        self,
        timeline: SweepTimeline,
        limit_bytes: int,
        by_seconds: bool,
        most_rows: int,
        most_seconds: float,
        is_relaxed: bool = False,
    ) -> None:
        self._timeline = timeline
        self._decisions = Decisions(timeline)
        self._limit_bytes = limit_bytes
        self._by_seconds = by_seconds
        self._most_rows = most_rows
        self._most_seconds = most_seconds
        self._is_relaxed = is_relaxed
        self._graph: StateGraph | None = None
        self._guides: Sequence[Guide] = ()
        self._least = math.inf
        self._num_cells = 0
        # Columns before and behind these are alike in all rows, and made when something reaches them.
        self._first_made = self._num_made = timeline.column_of_op(max(timeline.ops_to_decide(), default=0))
        nothing: Ints = np.zeros(0, dtype=np.int64)
        self._rows = Rows(nothing, nothing, np.zeros((1, 0), dtype=np.int64), np.zeros(1))
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
            self._reach(timeline.op_key(op), decisions.last_key(self._rows, op))
            choices = decisions.choices(op)
            parts = [decisions.decided(self._rows, op, dropped) for dropped in choices]
            choice = np.repeat(np.arange(len(parts)), [part.num_rows for part, _ in parts])
            self._rows = joined([part for part, _ in parts])
            self._history.append((np.concatenate([which for _, which in parts]), choice, choices))
            decisions.finish(self._rows, op)
            self._num_cells += self._rows.num_rows * (len(self._rows.held) + _TABLES_BESIDE)
            self._keep(np.flatnonzero(self._is_within()))
            if not self._rows.num_rows:
                return self._result([])
            self._merge_columns(op)
            self._keep_most_promising(number, op)
            if not self._rows.num_rows:
                return self._result([])
        self._reach(0, timeline.end_key)
        decisions.copy_what_was_there_before(self._rows)
        self._keep(np.flatnonzero(self._is_within()))
        return self._result(self._plans())

    def _result(self, found: list[Found]) -> Swept:
        is_complete = self._least == math.inf
        beyond = self._most_seconds if self._by_seconds else self._limit_bytes + 1
        best = min((plan.seconds if self._by_seconds else plan.peak_bytes for plan in found), default=math.inf)
        return Swept(found, min(self._least, best, beyond), is_complete, self._num_cells)

    def _reach(self, first_key: int, last_key: int) -> None:
        """Have columns from one key to another."""
        timeline, rows = self._timeline, self._rows
        first = min(int(np.searchsorted(timeline.keys, first_key)), self._first_made)
        end = max(int(np.searchsorted(timeline.keys, last_key, side="right")), self._num_made)
        before, behind = slice(first, self._first_made), slice(self._num_made, end)
        if before.start < before.stop or behind.start < behind.stop:
            rows.keys = np.concatenate([timeline.keys[before], rows.keys, timeline.keys[behind]])
            rows.kinds = np.concatenate([timeline.kinds[before], rows.kinds, timeline.kinds[behind]])
            more = [
                np.broadcast_to(timeline.first_memory[part], (rows.num_rows, part.stop - part.start))
                for part in (before, behind)
            ]
            rows.memory = np.concatenate([more[0], rows.memory, more[1]], axis=1)
            self._first_made, self._num_made = first, end

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

    def _unbeaten(self, classes: Classes) -> Ints:
        """Return the rows that none of the same class beats."""
        kept: list[Ints] = []
        for which in _groups(classes.hashes):
            if len(which) == 1:
                kept.append(which)
                continue
            memory = classes.memory[which]
            criteria = memory[:, (memory != memory[0]).any(axis=0)].astype(np.float64)
            if self._by_seconds:
                criteria = np.concatenate([criteria, self._rows.seconds[which, None]], axis=1)
            kept.append(which[unbeaten(criteria)])
        return np.sort(np.concatenate(kept))

    def _take_together(self, classes: Classes) -> Ints:
        """Let one row stand for several of its class that need nearly the same, with the least that any of them needs.

        Return which rows do; there are no more than allowed if there are no more classes.
        """
        rows, memory = self._rows, classes.memory
        finest = max(self._limit_bytes * _FINEST_UNIT, 1.0)
        most_seconds = max(float(rows.seconds.max()), 1e-300)

        def groups(coarseness: int) -> tuple[npt.NDArray[np.uint64], Ints]:
            unit = int(finest * _UNIT_GROWTH**coarseness)
            columns = [classes.hashes.view(np.int64), *(memory // unit).T]
            if self._by_seconds:
                columns.append((rows.seconds * (self._limit_bytes / unit / most_seconds)).astype(np.int64))
            together = hashed(columns, rows.num_rows)
            which, of_group = np.unique(together, return_inverse=True)
            return which, of_group

        coarseness = bisect_left(
            range(_MOST_COARSENESS), True, key=lambda number: len(groups(number)[0]) <= self._most_rows
        )
        which, of_group = groups(coarseness)
        order = np.argsort(of_group, kind="stable")
        firsts = np.searchsorted(of_group[order], np.arange(len(which)))
        least = np.minimum.reduceat(memory[order], firsts, axis=0)[of_group]
        least_seconds = np.minimum.reduceat(rows.seconds[order], firsts)[of_group]
        # The smallest stands for all.
        order = np.lexsort((rows.peaks(), of_group))
        standing = np.sort(order[firsts])
        self._lower(classes, least, standing)
        rows.seconds[standing] = least_seconds[standing]
        return standing

    def _lower(self, classes: Classes, least: Ints, which: Ints) -> None:
        """Let these rows have no more in any zone than the least given."""
        rows = self._rows
        lower = np.take_along_axis(least[which], classes.zones[which], axis=1)
        part = np.ix_(which, classes.columns)
        rows.memory[part] = np.minimum(rows.memory[part], lower)
        for number, gaps in enumerate(classes.gaps[which].T):
            there = np.flatnonzero(gaps >= 0)
            at = which[there], gaps[there]
            rows.memory[at] = np.minimum(rows.memory[at], least[which[there], classes.num_zones + number])
        for op, (_, memory) in rows.runs.items():
            memory[which] = np.minimum(memory[which], least[which, classes.runs[op][which]])

    def _keep_most_promising(self, level_number: int, op: int) -> None:
        promises = self._promises(level_number)
        self._keep(which := np.flatnonzero(promises.is_possible))
        promises = promises.taken(which)
        if self._rows.num_rows > min(self._most_rows * _SHARE_NOT_COMPARED, _MOST_NOT_COMPARED):
            classes = classes_of(self._rows, self._timeline, op)
            self._keep(which := self._unbeaten(classes))
            promises = promises.taken(which)
            if self._is_relaxed and self._rows.num_rows > self._most_rows:
                self._keep(self._take_together(classes.taken(which)))
                promises = self._promises(level_number)
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
        is_made = (self._guide_columns >= self._first_made) & (self._guide_columns < self._num_made)
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


def _groups(hashes: npt.NDArray[np.uint64]) -> list[Ints]:
    """Return the rows of each class."""
    order = np.argsort(hashes, kind="stable")
    borders = np.flatnonzero(hashes[order][1:] != hashes[order][:-1]) + 1
    return np.split(order, borders)


def _zone_starts(cuts: set[int], keys: Ints) -> Ints:
    """Return the positions of the keys before which there is a cut."""
    zones = np.searchsorted(np.array(sorted(cuts), dtype=np.int64), keys, side="right")
    return np.flatnonzero(np.append(True, zones[1:] != zones[:-1]))
