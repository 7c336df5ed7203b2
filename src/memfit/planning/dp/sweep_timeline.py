"""When what comes and goes, in whole numbers that can be compared before it is known which ops run again.

The simulator counts positions, which depend on how many ops run again. Here, time is a line of *slots*: one for each op
of the step, and before it one for each value that the backward pass reads there for the first time. A *key* is a point
of that line: an op's own slot, or the run of a recipe within the slot of the read that it runs for. Recipes that run
for one read run in the order of the forward pass, so the key of a run is its slot and then its op.

Memory is looked at in three kinds of columns: while an op runs; at the beginning of a slot, where a recipe may run that
is yet to be decided on (a *gap*, which no step ever passes through by itself); and, at the end of a slot, the most that
was live in any run of that slot. `first_memory` is what is live there under every plan.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import numpy.typing as npt

from memfit.planning.bounds.replay_rows import starts_from_new
from memfit.planning.candidates.enumeration import values_that_matter
from memfit.planning.step import NEVER, Step

Ints = npt.NDArray[np.int64]

NOBODY = 2**40
"""The slot of a value that nobody asks for: later than all."""
NOTHING = -(2**50)
"""The memory of a column at which nothing runs: far below all others, and far from overflowing in sums."""

GAP, RUNS, OP = 0, 1, 2
"""The kinds of columns."""


class SweepTimeline:
    """The slots of one step, what is certain in them, and which values there is something to decide about.

    With ``before_op``, only the values made before it are decided on, and only the times are looked at that come after
    whatever later ops' values are read for. What is live then, of earlier values, may have been held or brought back
    before: the rest of the step cannot tell. So what is found there holds for every plan of the whole step.
    """

    def __init__(self, step: Step, may_be_recomputed: Set[int], *, before_op: int | None = None) -> None:
        self.step = step
        may = frozenset(may_be_recomputed)
        droppable = {value for value in values_that_matter(step, may) if starts_from_new(step, value, may)}
        self.is_part = before_op is not None
        self.droppable = frozenset(droppable)
        self.first_time = 0
        if before_op is not None:
            later = (self._first_read(value) for value in droppable if step.value_op[value] >= before_op)
            self.first_time = 1 + max((time for time in later if time < NEVER), default=-1)
            self.droppable = frozenset(
                value
                for value in droppable
                if step.value_op[value] < before_op and self._first_read(value) >= self.first_time
            )
        self.recipes = frozenset(step.value_op[value] for value in self.droppable)
        self.read_by_recipes = frozenset(value for op in self.recipes for value in step.op_inputs[op])
        self._index_slots(droppable)
        self._index_storages(droppable)
        self._index_columns()
        self._index_events()

    def _first_read(self, value: int) -> int:
        rank = self.step.read_rank_of_value[value]
        return NEVER if rank == NEVER else self.step.read_times[rank]

    def _index_slots(self, droppable: Set[int]) -> None:
        step = self.step
        ranks_at: dict[int, list[int]] = {}
        for rank in sorted({step.read_rank_of_value[value] for value in droppable} - {NEVER}):
            ranks_at.setdefault(step.read_times[rank], []).append(rank)
        slot_of_rank: dict[int, int] = {NEVER: NOBODY}
        self._slot_of_op: list[int] = []
        times: list[int] = []
        for time in range(step.num_ops):
            for rank in ranks_at.get(time, ()):
                slot_of_rank[rank] = len(times)
                times.append(time)
            self._slot_of_op.append(len(times))
            times.append(time)
        self.time_of_slot: Ints = np.array(times, dtype=np.int64)
        self.keys_per_slot = step.num_ops + 2
        self.end_key = len(times) * self.keys_per_slot
        self.slot_of_first_read = {value: slot_of_rank[step.read_rank_of_value[value]] for value in droppable}

    def op_key(self, time: int) -> int:
        """Return the key of an op's own slot; what outlives the step ends behind the last."""
        return self._slot_of_op[time] * self.keys_per_slot if time < self.step.num_ops else self.end_key

    def _index_storages(self, droppable: Set[int]) -> None:
        """Find until when storages live under every plan, and from when on values do that are waited for."""
        step = self.step
        self.certain_end = list(step.natural_end_of_storage)
        self.is_single = [len(values) == 1 for values in step.values_of_storage]
        self.open_storages: set[int] = set()
        self.waited_for: dict[int, tuple[int, int]] = {}
        for storage, values in enumerate(step.values_of_storage):
            if not 0 <= step.storage_start[storage] < NEVER:
                continue
            for value in values:
                is_open = value in self.droppable
                # What is read before the first time is live from then on, however it came to be.
                is_whole = step.value_bytes[value] == step.storage_bytes[storage]
                is_there = is_whole and self._first_read(value) < self.first_time
                if not is_open and (value not in droppable or is_there):
                    end = max(self.certain_end[storage], step.last_release_of_value[value])
                    self.certain_end[storage] = end
                if is_open or value in self.read_by_recipes:
                    self.open_storages.add(storage)
            saved = [value for value in values if step.last_release_of_value[value] >= 0]
            if len(saved) == 1 and saved[0] in self.droppable and self._first_read(saved[0]) < NEVER:
                # Once it was read, a value is there until autograd lets go of it, wherever it came from.
                first = max(self._first_read(saved[0]), self.certain_end[storage] + 1)
                last = step.last_release_of_value[saved[0]]
                if first <= last and step.value_bytes[saved[0]] == step.storage_bytes[storage]:
                    self.waited_for[saved[0]] = (self.op_key(first), self.op_key(last))

    def _index_columns(self) -> None:
        step = self.step
        keys: list[int] = []
        kinds: list[int] = []
        is_op = set(self._slot_of_op)
        for slot in range(len(self.time_of_slot)):
            start = slot * self.keys_per_slot
            keys += [start] if slot in is_op else [start, start + self.keys_per_slot - 1]
            kinds += [OP] if slot in is_op else [GAP, RUNS]
        self.keys: Ints = np.array(keys, dtype=np.int64)
        self.kinds: Ints = np.array(kinds, dtype=np.int64)
        memory: Ints = np.full(len(keys), step.resident_bytes, dtype=np.int64)
        for time in range(step.num_ops):
            memory[self.column_of_op(time)] += step.workspace_bytes[time]
        for storage, start in enumerate(step.storage_start):
            if 0 <= start < NEVER:
                last = self.op_key(self.certain_end[storage])
                memory[self.columns_within(self.op_key(start), last)] += step.storage_bytes[storage]
        for value, (first, last) in self.waited_for.items():
            memory[self.columns_within(first, last)] += step.value_bytes[value]
        memory[self.kinds == RUNS] = NOTHING
        if self.is_part:
            memory[self.keys < self.op_key(self.first_time)] = NOTHING
        self.first_memory = memory

    def column_of_op(self, time: int) -> int:
        """Return the column that looks at memory while the op runs."""
        return int(np.searchsorted(self.keys, self.op_key(time)))

    def columns_within(self, first_key: int, last_key: int) -> slice:
        """Return the columns at these keys and between them."""
        return slice(*np.searchsorted(self.keys, (first_key, last_key + 1)).tolist())

    def _index_events(self) -> None:
        """Note where what is decided at some op can begin or end, so that columns between can be merged later."""
        step = self.step
        begins: list[tuple[int, int]] = []
        ends: list[tuple[int, int]] = []
        own: list[tuple[int, int]] = []
        latest = self._latest_uses()
        for value in sorted(self.droppable | self.read_by_recipes):
            storage = step.value_storage[value]
            # What lies in a storage that was there before the step is known to end with all of its readers only.
            is_outside = step.storage_start[storage] < 0 and value not in self.droppable
            if is_outside and step.overwritten_at[value] == NEVER:
                # It takes no memory of its own.
                continue
            op = -1 if is_outside else step.value_op[value]
            first = op if op < 0 else step.storage_start[storage]
            if step.last_release_of_value[value] >= 0:
                ends.append((first, self.op_key(step.last_release_of_value[value]) + 1))
            if step.overwritten_at[value] < NEVER:
                begins.append((op, self.op_key(step.overwritten_at[value])))
            if op >= 0:
                # Up to its certain end it was counted, from then on it may be kept.
                begins += [(first, self.op_key(self.certain_end[storage]) + 1), (op, self.op_key(op))]
            if value in self.waited_for:
                first_key, last_key = self.waited_for[value]
                ends.append((first, first_key))
                is_needed_later = latest.get(value, -1) > step.last_release_of_value[value]
                (begins if is_needed_later else ends).append((first, last_key + 1))
            if value in self.droppable and self.slot_of_first_read[value] < NOBODY:
                own.append((op, self.slot_of_first_read[value]))
        for storage in sorted(self.open_storages):
            start = step.storage_start[storage]
            begins.append((start, self.op_key(start)))
        self._begin_ops, self._begin_keys = _columns(begins)
        self._end_ops, self._end_keys = _columns(ends)
        self._own_ops, self._own_slots = _columns(own)

    def _latest_uses(self) -> dict[int, int]:
        """Return the time of the last read for which a recipe that starts from a value can run, by value."""
        step = self.step
        latest: dict[int, int] = {}
        for op in sorted(self.recipes, reverse=True):
            times = [-1]
            for value in step.op_outputs[op]:
                if value in self.droppable:
                    first_read = self._first_read(value)
                    times += [latest.get(value, -1), first_read if first_read < NEVER else -1]
            for value in step.op_inputs[op]:
                latest[value] = max(latest.get(value, -1), *times)
        return latest

    def events_before(self, op: int, last_key: int) -> tuple[set[int], set[int]]:
        """Return the keys where what earlier ops make can begin, or has just ended, and the slots they may run in."""
        keys = self._begin_keys[(self._begin_ops < op) & (self._begin_keys <= last_key)]
        ends = self._end_keys[(self._end_ops < op) & (self._end_keys <= last_key)]
        slots = self._own_slots[(self._own_ops < op) & (self._own_slots * self.keys_per_slot <= last_key)]
        return {*keys.tolist(), *ends.tolist()}, set(slots.tolist())

    def begins_before(self, op: int, last_key: int) -> set[int]:
        """Return those of the keys where what earlier ops make can begin; in slots it can do so, too."""
        return set(self._begin_keys[(self._begin_ops < op) & (self._begin_keys <= last_key)].tolist())

    def borders_of_slot(self, slot: int, op: int) -> tuple[int, int]:
        """Return the keys between which ops before ``op`` can still run in a slot."""
        return slot * self.keys_per_slot, slot * self.keys_per_slot + op + 1

    def ops_to_decide(self) -> list[int]:
        """Return the ops at which something is decided or known to end, the last first."""
        step = self.step
        made_at = {step.value_op[value] for value in self.read_by_recipes}
        last = max(self.recipes | made_at, default=-1)
        return [
            op
            for op in range(last, -1, -1)
            if op in self.recipes or any(step.value_storage[v] in self.open_storages for v in step.op_outputs[op])
        ]


def _columns(pairs: list[tuple[int, int]]) -> tuple[Ints, Ints]:
    table: Ints = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
