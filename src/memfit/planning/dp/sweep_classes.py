"""Which partial plans of a sweep have the same future, and what of each makes a difference there.

What is yet to be decided on begins and ends at *cuts*: keys that are the same for all rows (where earlier values are
made, read and let go of), and keys of the row's own (the slots that values are asked for in, the last runs that start
from them). Between two neighbouring cuts, a *zone*, whatever is added is added everywhere, so that of memory only the
most in each zone matters. And of the row's own keys only their order among the cuts does: a value that is asked for in
the backward pass of the last block, and one that is asked for in that of the block before, leave the same to decide.
So rows whose cuts are in the same order are of one *class*, whatever their states. Where blocks are alike there are few
classes, however many blocks there are.

Besides zones, what is live at the beginning of a slot counts, where a recipe that is yet to be decided on may run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.planning.dp.sweep_rows import Rows, hashed
from memfit.planning.dp.sweep_timeline import GAP, NOBODY, NOTHING, Ints, SweepTimeline

Flags = npt.NDArray[np.bool_]

_NO_CUT = 2**60
_MORE_THAN_ALL_MEMORY = 2**46


class Classes(NamedTuple):
    """By row: the hash of its class, and what counts of its memory. Rows of one class have the same columns.

    The first ``num_zones`` columns of ``memory`` are zones. ``zones`` has, by row, the zone of each of the rows' own
    ``columns``, and ``runs`` that of the run of an op. Then come the beginnings of slots: ``gaps`` are, by row, their
    columns in the rows' memory, -1 where there is none.
    """

    hashes: npt.NDArray[np.uint64]
    memory: Ints
    num_zones: int
    columns: Ints
    zones: Ints
    runs: dict[int, Ints]
    gaps: Ints

    def taken(self, rows: Ints) -> Classes:
        """Return those of some of the rows, in the order given."""
        runs = {run: zones[rows] for run, zones in self.runs.items()}
        memory, zones, gaps = self.memory[rows], self.zones[rows], self.gaps[rows]
        return Classes(self.hashes[rows], memory, self.num_zones, self.columns, zones, runs, gaps)


def classes(rows: Rows, timeline: SweepTimeline, op: int) -> Classes:
    """Return the classes of rows in which all ops from ``op`` on are decided."""
    cuts = _Cuts(rows, timeline, op)
    # What lies before is alike in all rows.
    columns = np.flatnonzero((rows.kinds != GAP) & (rows.keys >= timeline.op_key(op)))
    zones = cuts.zones_of_all(rows.keys[columns])
    memory = _most_of_zones(rows.memory[:, columns], zones, cuts.num_zones)
    everyone = np.arange(rows.num_rows)
    runs = {run: cuts.zones_of(run_keys) for run, (run_keys, _) in rows.runs.items()}
    for run, at in runs.items():
        memory[everyone, at] = np.maximum(memory[everyone, at], rows.runs[run][1])
    _raise_to_earlier(memory, cuts.begins_with_end())
    gaps = _gaps(rows, timeline, cuts.slots)
    at_gaps = np.where(gaps >= 0, np.take_along_axis(rows.memory, np.maximum(gaps, 0), axis=1), NOTHING)
    hashes = hashed(cuts.order(), rows.num_rows)
    return Classes(hashes, np.concatenate([memory, at_gaps], axis=1), cuts.num_zones, columns, zones, runs, gaps)


class _Cuts:
    """The cuts of rows: ``certain`` ones are those of all."""

    def __init__(self, rows: Rows, timeline: SweepTimeline, op: int) -> None:
        self._rows = rows
        self._per_slot = timeline.keys_per_slot
        first_key, last_key = timeline.op_key(op), int(rows.keys[-1])
        certain, slots = timeline.events_before(op, last_key)
        begins = timeline.begins_before(op, last_key)
        for slot in slots:
            begins.update(timeline.borders_of_slot(slot, op))
        self.slots = sorted(slots)
        self._certain: Ints = np.array(sorted(k for k in certain | begins if k >= first_key), dtype=np.int64)
        self._certain_ends = sorted(key for key in certain - begins if key >= first_key)
        self._own_ends = [np.where(ends >= 0, ends + 1, _NO_CUT) for ends in rows.end_keys()]
        # What is taken over ends one key before.
        self._own_ends += [np.where(rows.held[value] >= 0, rows.held[value], _NO_CUT) for value in rows.uses]
        self._own_begins = [
            np.where(asked < NOBODY, asked * self._per_slot + border, _NO_CUT)
            for asked in rows.asked.values()
            for border in timeline.borders_of_slot(0, op)
        ]
        own = np.stack([*self._own_ends, *self._own_begins, np.full(rows.num_rows, _NO_CUT)], axis=1)
        own[np.isin(own, self._certain)] = _NO_CUT
        own.sort(axis=1)
        own[:, 1:][own[:, 1:] == own[:, :-1]] = _NO_CUT
        self._own: Ints = own
        self.num_zones = len(self._certain) + own.shape[1] + 1

    def zones_of(self, keys: Ints) -> Ints:
        """Return the zone of a key, by row: the number of cuts up to it."""
        zones: Ints = np.searchsorted(self._certain, keys, side="right") + (self._own <= keys[:, None]).sum(axis=1)
        return zones

    def zones_of_all(self, keys: Ints) -> Ints:
        """Return the zones of the same keys for all rows."""
        zones = np.tile(np.searchsorted(self._certain, keys, side="right"), (self._rows.num_rows, 1))
        for own in self._own.T:
            zones += own[:, None] <= keys[None]
        return zones

    def order(self) -> list[Ints]:
        """Return all that the future of a row depends on, besides memory: equal for rows of one class."""
        rows = self._rows
        order: list[Ints] = []
        for asked in rows.asked.values():
            order += self._place(asked * self._per_slot, asked < NOBODY)
        for ends in rows.end_keys():
            order += self._place(ends + 1, ends >= 0)
        return order + [column for table in (rows.uses, rows.must_drop, rows.is_kept) for column in table.values()]

    def _place(self, keys: Ints, is_there: Flags) -> list[Ints]:
        """Return how many cuts, of all rows and altogether, there are up to a key, and whether it is one of all."""
        num_certain = np.searchsorted(self._certain, keys, side="right")
        is_certain = np.isin(keys, self._certain)
        return [np.where(is_there, number, -1) for number in (self.zones_of(keys), num_certain, is_certain)]

    def begins_with_end(self) -> Flags:
        """Return whether, by row and zone, things can only end where it begins."""
        num_rows = self._rows.num_rows
        is_end = np.zeros((num_rows, self.num_zones), dtype=bool)
        for key in self._certain_ends:
            is_end[np.arange(num_rows), self.zones_of(np.full(num_rows, key))] = True
        for keys in self._own_ends:
            which = np.flatnonzero((keys < _NO_CUT) & ~np.isin(keys, self._certain))
            is_end[which, self.zones_of(keys)[which]] = True
        for keys in self._own_begins:
            which = np.flatnonzero(keys < _NO_CUT)
            is_end[which, self.zones_of(keys)[which]] = False
        return is_end


def _most_of_zones(memory: Ints, zones: Ints, num_zones: int) -> Ints:
    """Return the most of each row in each zone; along a row, zones never fall."""
    most = np.full((len(memory), num_zones), NOTHING)
    if memory.shape[1]:
        is_first = np.ones(zones.shape, dtype=bool)
        is_first[:, 1:] = zones[:, 1:] != zones[:, :-1]
        firsts = np.flatnonzero(is_first)
        most[firsts // memory.shape[1], zones.ravel()[firsts]] = np.maximum.reduceat(memory.ravel(), firsts)
    return most


def _raise_to_earlier(memory: Ints, begins_with_end: Flags) -> None:
    """Let a zone have at least what the one before has, where things can only end between them.

    No more is then added to it than to the one before. So as long as it has no more to begin with, it never has more,
    and what it has makes no difference.
    """
    offset = np.cumsum(~begins_with_end, axis=1) * _MORE_THAN_ALL_MEMORY
    np.maximum(memory, 0, out=memory)
    memory += offset
    np.maximum.accumulate(memory, axis=1, out=memory)
    memory -= offset


def _gaps(rows: Rows, timeline: SweepTimeline, certain_slots: list[int]) -> Ints:
    """Return, by row, the columns of the beginnings of the slots in which ops that are yet to be decided on may run."""
    positions = np.flatnonzero(rows.kinds == GAP)
    wanted = [np.full(rows.num_rows, slot) for slot in certain_slots] + list(rows.asked.values())
    if not wanted or not len(positions):
        return np.zeros((rows.num_rows, 0), dtype=np.int64)
    slots_of_gaps = rows.keys[positions] // timeline.keys_per_slot
    slots = np.stack(wanted, axis=1)
    at = np.minimum(np.searchsorted(slots_of_gaps, slots), len(positions) - 1)
    return np.where(slots_of_gaps[at] == slots, positions[at], -1)
