"""Partial plans side by side, one a row: decisions for the last ops of the forward pass, and what they mean so far.

When an op is decided on, all that reads its values is decided already. So it is known for which read the op runs again,
if it does, and until when each of its values is needed; and so is the interval of time in which each of its buffers
takes memory. What a row must remember for the ops to come is little (its *state*), for each value that was read and not
yet made:

- ``asked``, the slot of the first read for which it is needed,
- ``held``, the key of the last run that starts from it,
- ``uses``, how many runs start from it, where an op in place may take over its buffer,
- ``must_drop``, that an op in place is to run again on it, which it does only on what is dropped,

and for each storage of several values ``ends`` (until when those decided so far keep it) and ``is_kept`` (whether the
one that autograd saves is among them). Rows of one state differ in memory and seconds only.

All of it is as the simulator has it, but for one thing: a recipe that never runs holds what it starts from there, and
nothing here. That can only make plans smaller than they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memfit.planning.dp.sweep_timeline import GAP, NOBODY, NOTHING, Ints, SweepTimeline
from memfit.planning.step import NEVER

Interval = tuple[int, int]
_STATE_TABLES = ("asked", "held", "uses", "must_drop", "ends", "is_kept")
# Odd numbers with their bits well spread, for hashes.
_FIRST_HASH, _HASH_FACTOR, _HASH_SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(29)


@dataclass(slots=True)
class Rows:
    """Numbers by row. ``memory`` has a column for each of ``keys``; ``runs`` are columns whose key differs by row.

    Tables are by value, ``ends`` and ``is_kept`` by storage, ``runs`` by op: keys (-1 is none) and memory. Those are
    runs of a slot within which something that is yet to be decided on may end.
    """

    keys: Ints
    kinds: Ints
    memory: Ints
    seconds: npt.NDArray[np.float64]
    asked: dict[int, Ints] = field(default_factory=dict)
    held: dict[int, Ints] = field(default_factory=dict)
    uses: dict[int, Ints] = field(default_factory=dict)
    must_drop: dict[int, Ints] = field(default_factory=dict)
    ends: dict[int, Ints] = field(default_factory=dict)
    is_kept: dict[int, Ints] = field(default_factory=dict)
    runs: dict[int, tuple[Ints, Ints]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """How many partial plans there are."""
        return len(self.seconds)

    def taken(self, rows: Ints) -> Rows:
        """Return some of the rows, in the order given."""
        taken = Rows(self.keys, self.kinds, self.memory[rows], self.seconds[rows])
        for name in _STATE_TABLES:
            setattr(taken, name, {index: column[rows] for index, column in getattr(self, name).items()})
        taken.runs = {op: (keys[rows], memory[rows]) for op, (keys, memory) in self.runs.items()}
        return taken

    def states(self) -> npt.NDArray[np.uint64]:
        """Return a hash of each row's state."""
        tables = (getattr(self, name) for name in _STATE_TABLES)
        columns = [table[index] for table in tables for index in sorted(table)]
        return hashed(columns, self.num_rows)

    def end_keys(self) -> Iterable[Ints]:
        """Return the tables of keys at which something that is yet to be decided on may end."""
        return (*self.held.values(), *self.ends.values())

    def peaks(self) -> Ints:
        """Return the most that is live anywhere, of what is decided so far."""
        is_real = self.kinds != GAP
        peaks: Ints = self.memory[:, is_real].max(axis=1, initial=NOTHING)
        for _, memory in self.runs.values():
            peaks = np.maximum(peaks, memory)
        return peaks

    def add(self, first: Ints, last: Ints, num_bytes: int, *, without: Sequence[Interval] = ()) -> None:
        """Let a buffer take memory from one key to another, by row, but for keys at which it was counted already."""
        if num_bytes == 0 or not (last >= first).any():
            return
        part = slice(*np.searchsorted(self.keys, (int(first.min()), int(last.max()) + 1)).tolist())
        self.memory[:, part] += _covered(self.keys[None, part], first[:, None], last[:, None], without) * num_bytes
        for op, (keys, memory) in self.runs.items():
            self.runs[op] = keys, memory + _covered(keys, first, last, without) * num_bytes


def _covered(keys: Ints, first: Ints, last: Ints, without: Sequence[Interval]) -> npt.NDArray[np.bool_]:
    covered = (keys >= first) & (keys <= last)
    for start, end in without:
        covered &= (keys < start) | (keys > end)
    return covered


def hashed(columns: Iterable[Ints], num_rows: int) -> npt.NDArray[np.uint64]:
    """Return a hash of the numbers of each row."""
    hashes = np.full(num_rows, _FIRST_HASH)
    for column in columns:
        hashes = (hashes ^ column.astype(np.uint64)) * _HASH_FACTOR
        hashes ^= hashes >> _HASH_SHIFT
    return hashes


def joined(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts, which have the same columns and tables."""
    first = parts[0]
    rows = Rows(
        first.keys,
        first.kinds,
        np.concatenate([part.memory for part in parts]),
        np.concatenate([part.seconds for part in parts]),
    )
    for name in _STATE_TABLES:
        table = {
            index: np.concatenate([getattr(part, name)[index] for part in parts]) for index in getattr(first, name)
        }
        setattr(rows, name, table)
    for op in sorted({op for part in parts for op in part.runs}):
        none = [(np.full(part.num_rows, -1), np.full(part.num_rows, NOTHING)) for part in parts]
        columns = [part.runs.get(op, nothing) for part, nothing in zip(parts, none, strict=True)]
        rows.runs[op] = np.concatenate([keys for keys, _ in columns]), np.concatenate([memory for _, memory in columns])
    return rows


class Decisions:
    """What deciding on the values of one op after the other, the last first, means for rows."""

    def __init__(self, timeline: SweepTimeline) -> None:
        self._timeline = timeline
        self._step = timeline.step
        self._may_be_taken_over = {value for value in self._step.rewritten_input_of_op if value >= 0}

    def choices(self, op: int) -> list[tuple[int, ...]]:
        """Return the sets of the op's values that may be dropped."""
        droppable = [value for value in self._step.op_outputs[op] if value in self._timeline.droppable]
        return [
            tuple(value for number, value in enumerate(droppable) if bits >> number & 1)
            for bits in range(2 ** len(droppable))
        ]

    def begin(self, rows: Rows, op: int) -> None:
        """Follow what the op reads and makes from now on."""
        step, timeline, num_rows = self._step, self._timeline, rows.num_rows
        reads = step.op_inputs[op] if op in timeline.recipes else ()
        for value in (*step.op_outputs[op], *reads):
            is_outside = step.value_op[value] < 0 and step.overwritten_at[value] == NEVER
            if value not in rows.held and not is_outside:
                rows.held[value] = np.full(num_rows, -1)
                if value in timeline.droppable:
                    rows.asked[value] = np.full(num_rows, timeline.slot_of_first_read[value])
                    rows.must_drop[value] = np.zeros(num_rows, dtype=np.int64)
                if value in self._may_be_taken_over:
                    rows.uses[value] = np.zeros(num_rows, dtype=np.int64)
            storage = step.value_storage[value]
            if storage in timeline.open_storages and storage not in rows.ends and not timeline.is_single[storage]:
                rows.ends[storage] = np.full(num_rows, -1)
                rows.is_kept[storage] = np.zeros(num_rows, dtype=np.int64)

    def last_key(self, rows: Rows, op: int) -> int:
        """Return the last key up to which the values of the op can take memory."""
        step, timeline = self._step, self._timeline
        keys = [timeline.op_key(op)]
        for value in step.op_outputs[op]:
            keys.append(int(rows.held[value].max()))
            if value in rows.asked:
                asked = rows.asked[value][rows.asked[value] < NOBODY]
                keys.append((int(asked.max(initial=-1)) + 1) * timeline.keys_per_slot - 1)
            if step.last_release_of_value[value] >= 0:
                keys.append(timeline.op_key(step.last_release_of_value[value]))
            if step.value_storage[value] in rows.ends:
                keys.append(int(rows.ends[step.value_storage[value]].max()))
        return max(keys)

    def decided(self, rows: Rows, op: int, dropped: Sequence[int], *, with_runs: bool = True) -> tuple[Rows, Ints]:
        """Return the rows with these of the op's values dropped and the others kept, and which rows those were.

        Without runs, memory is looked at while ops of the step run, and not while recipes do.
        """
        is_possible = np.ones(rows.num_rows, dtype=bool)
        slot = self._slot(rows, dropped)
        for value in self._step.op_outputs[op]:
            if value not in dropped and value in rows.asked:
                is_possible &= ~self._is_kept_in_vain(rows, value, slot)
            if value not in dropped and value in rows.must_drop and not self._timeline.is_part:
                is_possible &= rows.must_drop[value] == 0
            if value in dropped and not self._step.saves_of_value[value]:
                # Without anybody to ask for it, dropping it means nothing.
                is_possible &= (rows.asked[value] < NOBODY) | (rows.must_drop[value] == 1)
        which = np.flatnonzero(is_possible)
        decided = rows.taken(which)
        if len(which):
            if dropped:
                self._run_again(decided, op, dropped, with_runs)
            for value in self._step.op_outputs[op]:
                if value not in dropped and self._step.overwritten_at[value] < NEVER:
                    self._copy(decided, value)
                if self._step.value_storage[value] in self._timeline.open_storages:
                    self._keep_storage(decided, op, value, is_dropped=value in dropped)
        return decided, which

    def _is_kept_in_vain(self, rows: Rows, value: int, slot: Ints) -> npt.NDArray[np.bool_]:
        """Return where the op makes the value again in time anyway, and its storage lives for its sake only."""
        storage = self._step.value_storage[value]
        if not self._timeline.is_single[storage]:
            return np.zeros(rows.num_rows, dtype=bool)
        asked, certain_end = rows.asked[value], self._timeline.op_key(self._timeline.certain_end[storage])
        is_vain: npt.NDArray[np.bool_] = (slot <= asked) & (asked < NOBODY)
        return is_vain & (certain_end < slot * self._timeline.keys_per_slot)

    @staticmethod
    def _slot(rows: Rows, dropped: Sequence[int]) -> Ints:
        """Return the slot in which an op runs for the first of its dropped values that is asked for."""
        nobody = np.full(rows.num_rows, NOBODY)
        slot: Ints = np.minimum.reduce([nobody, *(rows.asked[value] for value in dropped)])
        return slot

    def _run_again(self, rows: Rows, op: int, dropped: Sequence[int], with_runs: bool) -> None:
        step, timeline = self._step, self._timeline
        slot = self._slot(rows, dropped)
        does_run = slot < NOBODY
        some_slot = np.where(does_run, slot, 0)
        key = np.where(does_run, slot * timeline.keys_per_slot + 1 + op, -1)
        if with_runs:
            gap = np.searchsorted(rows.keys, some_slot * timeline.keys_per_slot)
            before = rows.memory[np.arange(rows.num_rows), gap]
            rows.runs[op] = key, np.where(does_run, before + int(step.workspace_bytes[op]), NOTHING)
        rows.seconds = rows.seconds + does_run * step.replay_seconds[op]
        time = timeline.time_of_slot[some_slot]
        for value in step.op_outputs[op]:
            last = key
            if value in dropped:
                last = np.maximum(last, rows.held[value])
                release = step.last_release_of_value[value]
                if release >= 0:
                    last = np.where(release >= time, np.maximum(last, timeline.op_key(release)), last)
                last = last - self._is_taken_over(rows, value)
            counted = [timeline.waited_for[value]] if value in dropped and value in timeline.waited_for else []
            rows.add(np.where(does_run, key, 1), np.where(does_run, last, 0), step.value_bytes[value], without=counted)
        for value in step.op_inputs[op]:
            if value in rows.held:
                rows.held[value] = np.maximum(rows.held[value], key)
            if value in rows.asked:
                rows.asked[value] = np.minimum(rows.asked[value], slot)
            if value in rows.uses:
                rows.uses[value] = rows.uses[value] + does_run
        for value in step.profile.ops[op].rewrites:
            if value in step.op_inputs[op] and value in rows.must_drop:
                rows.must_drop[value] = np.ones(rows.num_rows, dtype=np.int64)

    def _is_taken_over(self, rows: Rows, value: int) -> Ints:
        """Return 1 where an op in place works in the value's buffer: it is the only one to use it."""
        if value not in rows.uses or value not in rows.must_drop:
            return np.zeros(rows.num_rows, dtype=np.int64)
        is_only_use = rows.uses[value] + self._step.num_saves_of_value[value] == 1
        taken_over: Ints = (is_only_use & (rows.must_drop[value] == 1)).astype(np.int64)
        return taken_over

    def _copy(self, rows: Rows, value: int) -> None:
        """Let those who still need a value when it is written over have a copy."""
        last = rows.held[value]
        if self._timeline.is_part:
            # It may also have been dropped, and brought back before.
            last = last - self._is_taken_over(rows, value)
        first = np.full(rows.num_rows, self._timeline.op_key(self._step.overwritten_at[value]))
        rows.add(first, last, self._step.value_bytes[value])

    def _keep_storage(self, rows: Rows, op: int, value: int, *, is_dropped: bool) -> None:
        """Let the storage in which the value was first made take memory for as long as it is kept."""
        step, timeline = self._step, self._timeline
        storage, start = step.value_storage[value], timeline.op_key(op)
        end = np.full(rows.num_rows, -1)
        if not is_dropped:
            held, written_at = rows.held[value], step.overwritten_at[value]
            if value in timeline.droppable and step.last_release_of_value[value] >= 0:
                end = np.maximum(end, timeline.op_key(step.last_release_of_value[value]))
            written_key = timeline.end_key if written_at == NEVER else timeline.op_key(written_at)
            end = np.where(held < written_key, np.maximum(end, held), end)
        is_kept = np.full(rows.num_rows, not is_dropped)
        if storage in rows.ends:
            end = rows.ends[storage] = np.maximum(rows.ends[storage], end)
            if value in timeline.waited_for:
                rows.is_kept[storage] = is_kept.astype(np.int64)
            is_kept = rows.is_kept[storage] == 1
        made_here = [other for other in step.op_outputs[op] if step.value_storage[other] == storage]
        if step.storage_start[storage] < op or value != made_here[-1]:
            return
        certain = (start, timeline.op_key(timeline.certain_end[storage]))
        counted = [timeline.waited_for[v] for v in step.values_of_storage[storage] if v in timeline.waited_for]
        first = np.full(rows.num_rows, start)
        # Where the value that is waited for was dropped, it was counted with what its op makes.
        rows.add(first, np.where(is_kept, end, -1), step.storage_bytes[storage], without=[certain, *counted])
        rows.add(first, np.where(is_kept, -1, end), step.storage_bytes[storage], without=[certain])

    def finish(self, rows: Rows, op: int) -> None:
        """Forget what was decided, and whatever else makes no difference any more."""
        step, timeline = self._step, self._timeline
        for value in step.op_outputs[op]:
            for table in (rows.asked, rows.held, rows.uses, rows.must_drop):
                table.pop(value, None)
        for storage in [storage for storage in rows.ends if step.storage_start[storage] == op]:
            del rows.ends[storage], rows.is_kept[storage]
        for value, held in rows.held.items():
            if step.overwritten_at[value] == NEVER and step.value_op[value] >= 0:
                until = -1
                if value not in timeline.droppable:
                    until = timeline.op_key(timeline.certain_end[step.value_storage[value]])
                elif timeline.slot_of_first_read[value] < NOBODY:
                    until = timeline.op_key(step.last_release_of_value[value])
                rows.held[value] = np.where(held <= until, -1, held)
        self._settle_runs(rows)

    def _settle_runs(self, rows: Rows) -> None:
        """Put runs to the others of their slot where nothing can end between them any more."""
        per_slot = self._timeline.keys_per_slot
        for op, (keys, memory) in list(rows.runs.items()):
            slots = keys // per_slot
            is_open = np.zeros(rows.num_rows, dtype=bool)
            for end in rows.end_keys():
                is_open |= (end >= keys) & (end // per_slot == slots)
            settled = np.flatnonzero((keys >= 0) & ~is_open)
            columns = np.searchsorted(rows.keys, (slots[settled] + 1) * per_slot - 1)
            rows.memory[settled, columns] = np.maximum(rows.memory[settled, columns], memory[settled])
            keys, memory = keys.copy(), memory.copy()
            keys[settled], memory[settled] = -1, NOTHING
            rows.runs[op] = keys, memory
        self._take_runs_together(rows)
        for op in [op for op, (keys, _) in rows.runs.items() if (keys < 0).all()]:
            del rows.runs[op]

    def _take_runs_together(self, rows: Rows) -> None:
        """Put a run to a later one of its slot where nothing that is yet to be decided on can end between them."""
        per_slot = self._timeline.keys_per_slot
        ops = sorted(rows.runs)
        for number, op in enumerate(ops):
            keys, memory = (column.copy() for column in rows.runs[op])
            for later in ops[number + 1 :]:
                later_keys, later_memory = rows.runs[later]
                is_together = (keys >= 0) & (keys // per_slot == later_keys // per_slot)
                if not is_together.any():
                    continue
                for end in rows.end_keys():
                    # What is taken over ends one key before.
                    is_together &= (end < keys) | (end > later_keys)
                which = np.flatnonzero(is_together)
                later_memory = later_memory.copy()
                later_memory[which] = np.maximum(later_memory[which], memory[which])
                rows.runs[later] = later_keys, later_memory
                keys[which], memory[which] = -1, NOTHING
            rows.runs[op] = keys, memory

    def copy_what_was_there_before(self, rows: Rows) -> None:
        """Count the copies of what was there before the step and is written over: all of its readers are known now."""
        step = self._step
        for value in rows.held:
            if step.overwritten_at[value] < NEVER:
                self._copy(rows, value)
