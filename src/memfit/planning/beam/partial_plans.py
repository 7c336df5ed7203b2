"""Partial plans side by side, one a row: decisions for the last ops of the forward pass, and what they cost so far.

When an op is decided on, every op that reads its outputs is decided already. So it is known for which read of the
backward pass the op is replayed (its *slot*, the index of the op that the read precedes), and until when each of its
outputs is needed. A row remembers of each value that is read by a decided op and not yet decided itself:

- ``asked``, the earliest slot in which a replay starts from it,
- ``held``, the latest such slot, until which it must be in memory,
- ``must_drop``, whether an op that rewrites it in place is replayed, which takes a dropped input.

Memory is counted at the ops of the step that decided ops reach, from the op decided last (``_first``) on. Columns
between which nothing can begin or end any more are merged. Within one slot, replays run in the order of the forward
pass: ``_burst`` is, for replays that are yet to be decided, the memory of the slot relative to that at its end.

The counts follow the simulator's rules but for two details: what is overwritten is never copied, and an op whose
outputs nothing asks for holds nothing. The simulator judges what is found.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import numpy.typing as npt

from memfit.planning.step import NEVER, Step

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Table = dict[int, npt.NDArray[np.int64]]

NO_SLOT = 2**40
"""A slot later than all, for what is never replayed."""
_HASH_FACTOR, _HASH_SHIFT = np.uint64(0xBF58476D1CE4E5B9), np.uint64(29)
# Columns are merged when there are more than this, and twice as many as after the last time.
_FEW_COLUMNS = 48


class PartialPlans:
    """Rows of partial plans of one step. ``seconds`` are those of their replays."""

    def __init__(self, step: Step, may_be_recomputed: Set[int]) -> None:
        self._step = step
        self.droppable = step.droppable_of(may_be_recomputed)
        self._first_read = [NO_SLOT if rank == NEVER else step.read_times[rank] for rank in step.read_rank_of_value]
        # What is live at each op whatever is decided, and until when each storage lives.
        certain_ends, saved = step.natural_ends.copy(), np.ones(step.num_values, dtype=bool)
        saved[list(self.droppable)] = False
        np.maximum.at(certain_ends, step.storage_of_value[saved], step.releases_at[saved])
        self._certain = step.live_bytes(certain_ends)
        self._certain_end: list[int] = certain_ends.tolist()
        self._index_boundaries()
        turn = min(step.last_time_before_reads + 1, max(step.num_ops - 1, 0))
        self._first = self._end = turn
        self._starts: Ints = np.zeros(0, dtype=np.int64)
        self._memory: Ints = np.zeros((1, 0), dtype=np.int64)
        self._most: Ints = np.zeros((1, 0), dtype=np.int64)
        self._burst: Ints = np.zeros((1, 0), dtype=np.int64)
        self._num_columns_merged = _FEW_COLUMNS
        self.seconds: Numbers = np.zeros(1)
        self._asked: Table = {}
        self._held: Table = {}
        self._must_drop: Table = {}
        # Of storages with several values: until when those decided so far keep it.
        self._kept_until: Table = {}
        self._reach(turn, turn + 1)

    def _index_boundaries(self) -> None:
        """Note, for each op, the first op of whose outputs something can begin there, or end just before it."""
        step = self._step
        self._first_maker: Ints = np.full(step.num_ops + 2, NEVER, dtype=np.int64)
        for value, op in enumerate(step.value_op):
            if op < 0:
                continue
            read, release = self._first_read[value], step.last_release_of_value[value]
            for time in (self._certain_end[step.value_storage[value]] + 1, release + 1, read, read + 1):
                if 0 <= time <= step.num_ops:
                    self._first_maker[time] = min(self._first_maker[time], op)

    @property
    def num_rows(self) -> int:
        """How many partial plans there are."""
        return len(self.seconds)

    def peaks(self) -> Ints:
        """Return the most that each row has at the ops that are reached."""
        peaks: Ints = self._most.max(axis=1)
        return peaks

    def states(self) -> npt.NDArray[np.uint64]:
        """Return a hash of what each row remembers: rows of equal hashes leave the same to decide."""
        hashes = np.zeros(self.num_rows, dtype=np.uint64)
        for table in (self._asked, self._held, self._must_drop):
            for value in sorted(table):
                hashes = (hashes ^ table[value].astype(np.uint64)) * _HASH_FACTOR
                hashes ^= hashes >> _HASH_SHIFT
        return hashes

    def take(self, rows: Ints) -> None:
        """Keep some of the rows, in the order given; a row may be given several times."""
        self._memory, self._most, self._burst = self._memory[rows], self._most[rows], self._burst[rows]
        self.seconds = self.seconds[rows]
        for table in (self._asked, self._held, self._must_drop, self._kept_until):
            for index in table:
                table[index] = table[index][rows]

    def choices(self, op: int) -> list[tuple[int, ...]]:
        """Return which of its outputs an op may drop: none, and all that can be."""
        droppable = tuple(value for value in self._step.op_outputs[op] if value in self.droppable)
        return [(), droppable] if droppable else [()]

    def may_choose(self, op: int, dropped: Set[int]) -> Ints:
        """Return the rows that may drop these outputs of an op and save the others."""
        may_choose = np.ones(self.num_rows, dtype=bool)
        for value in self._step.op_outputs[op]:
            if value in self._must_drop and value not in dropped:
                may_choose &= self._must_drop[value] == 0
        return np.flatnonzero(may_choose)

    def decide(self, op: int, choices: Sequence[tuple[int, ...]], chosen: Ints) -> None:
        """Decide on the next op, the last of those that are left: which choice each row makes."""
        step = self._step
        self._reach(op, 1 + max(max(step.last_release_of_value[v], self._last_slot(v)) for v in step.op_outputs[op]))
        for value in step.op_outputs[op]:
            is_saved = np.array([value not in dropped for dropped in choices])
            self._save(value, np.flatnonzero(is_saved[chosen]))
        for number, dropped in enumerate(choices):
            slots = np.full(self.num_rows, NO_SLOT)
            for value in dropped:
                slots = np.minimum(slots, np.minimum(self._asked.get(value, NO_SLOT), self._first_read[value]))
            self._replay(op, dropped, np.flatnonzero((chosen == number) & (slots < step.num_ops)), slots)
        for value in step.op_outputs[op]:
            for table in (self._asked, self._held, self._must_drop):
                table.pop(value, None)
        if len(self._starts) > self._num_columns_merged:
            self._merge_columns(op)

    def _last_slot(self, value: int) -> int:
        """Return the last slot that its own read lets a value be replayed in: compiled code may release it before."""
        read = self._first_read[value]
        return read if read < self._step.num_ops else -1

    def _save(self, value: int, rows: Ints) -> None:
        step, storage = self._step, self._step.value_storage[value]
        certain_end = self._certain_end[storage]
        if not len(rows) or step.storage_start[storage] < 0:
            return
        last = np.full(len(rows), step.last_release_of_value[value])
        if value in self._held:
            last = np.maximum(last, self._held[value][rows] - 1)
        first = np.full(len(rows), certain_end + 1)
        if len(step.values_of_storage[storage]) > 1:
            kept_until = self._kept_until.setdefault(storage, np.full(self.num_rows, certain_end))
            first = kept_until[rows] + 1
            kept_until[rows] = np.maximum(kept_until[rows], last)
        self._add(rows, first, last, step.storage_bytes[storage])

    def _replay(self, op: int, dropping: Sequence[int], rows: Ints, slots: Ints) -> None:
        """Let rows drop these outputs, and replay the op in their slots."""
        if not len(rows):
            return
        step, slots = self._step, slots[rows]
        self.seconds[rows] += step.replay_seconds[op]
        for value in dropping:
            release = step.last_release_of_value[value]
            last = np.where(release >= slots, release, -1)
            if value in self._held:
                last = np.maximum(last, self._held[value][rows] - 1)
            self._add(rows, slots, last, step.value_bytes[value])
        columns = np.searchsorted(self._starts, slots)
        beside = sum(step.value_bytes[value] for value in step.op_outputs[op] if value not in dropping)
        level = self._burst[rows, columns] + beside + step.workspace_bytes[op]
        for value in set(step.op_inputs[op]):
            if step.value_op[value] >= 0:
                level += self._hold(value, rows, slots, columns, step.rewritten_input_of_op[op] == value)
        level += self._memory[rows, columns] - step.made_bytes[slots]
        self._most[rows, columns] = np.maximum(self._most[rows, columns], level)
        self._burst[rows, columns] -= sum(step.value_bytes[value] for value in dropping)

    def _hold(self, value: int, rows: Ints, slots: Ints, columns: Ints, is_rewritten: bool) -> Ints:
        """Let a value be there for replays in these slots; return what that adds to the memory while they run.

        A replay in place takes over the buffer of what it rewrites.
        """
        step, num_bytes = self._step, self._step.value_bytes[value]
        held = self._held.setdefault(value, np.full(self.num_rows, -1))
        asked = self._asked.setdefault(value, np.full(self.num_rows, NO_SLOT))
        storage = step.value_storage[value]
        is_there = max(step.last_release_of_value[value], step.natural_end_of_storage[storage]) >= slots
        before = held[rows]
        is_new = (slots > before) & ~is_there
        moved = is_new & (before >= 0)
        if moved.any():
            self._burst[rows[moved], np.searchsorted(self._starts, before[moved])] -= num_bytes
        self._burst[rows[is_new], columns[is_new]] += num_bytes
        held[rows] = np.where(is_there, before, np.maximum(before, slots))
        asked[rows] = np.minimum(asked[rows], slots)
        if is_rewritten:
            self._must_drop.setdefault(value, np.zeros(self.num_rows, dtype=np.int64))[rows] = 1
        return np.where(is_new & (not is_rewritten), num_bytes, 0)

    def _add(self, rows: Ints, first: Ints, last: Ints, num_bytes: int) -> None:
        """Add to the memory of rows from one op to another, both included."""
        columns = np.arange(len(self._starts))
        begin, end = np.searchsorted(self._starts, first), np.searchsorted(self._starts, last + 1)
        added = num_bytes * ((columns >= begin[:, None]) & (columns < end[:, None]))
        self._memory[rows] += added
        self._most[rows] += added

    def _reach(self, first: int, end: int) -> None:
        """Have columns from one op to before another."""
        # Where forward and backward alternate, ops may be decided on after reads that come before them.
        first, end = min(first, self._first), min(max(end, first + 1, self._end), self._step.num_ops)
        if len(self._starts) and first == self._first and end == self._end:
            return
        before = np.arange(first, self._first)
        behind = np.arange(self._end if len(self._starts) else self._first, end)
        self._starts = np.concatenate([before, self._starts, behind])

        def extended(rows: Ints, numbers: Ints) -> Ints:
            parts = [np.broadcast_to(numbers[times], (self.num_rows, len(times))) for times in (before, behind)]
            return np.concatenate([parts[0], rows, parts[1]], axis=1)

        self._memory = extended(self._memory, self._certain)
        self._most = extended(self._most, self._certain + self._step.workspace_bytes)
        self._burst = extended(self._burst, np.zeros(self._step.num_ops, dtype=np.int64))
        self._first, self._end = first, end

    def _merge_columns(self, op: int) -> None:
        """Merge columns between which nothing can begin or end, with ``op`` and all later ones decided."""
        slots = [np.unique(column) for table in (self._asked, self._held) for column in table.values()]
        ends = [np.unique(column) for column in self._kept_until.values()]
        boundaries = np.concatenate([*slots, *(slot + 1 for slot in slots), *(end + 1 for end in ends), [-1]])
        is_needed = (self._first_maker[self._starts] < op) | np.isin(self._starts, boundaries)
        is_needed[0] = True
        firsts = np.flatnonzero(is_needed)
        self._memory = np.maximum.reduceat(self._memory, firsts, axis=1)
        self._most = np.maximum.reduceat(self._most, firsts, axis=1)
        self._burst = np.maximum.reduceat(self._burst, firsts, axis=1)
        self._starts = self._starts[firsts]
        self._num_columns_merged = max(2 * len(firsts), _FEW_COLUMNS)
