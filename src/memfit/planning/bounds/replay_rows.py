"""Plans as the points of a linear program: what runs again, when, and what is live for it at chosen times of the step.

`bound` looks at one time of the step. A replay that is early enough for one time may be too early for another: what it
makes lies there until it is read. So this looks at several times ``t_1 < t_2 < …`` at once. For a plan, let

- ``replayed[op]`` be 1 where the op runs again, and ``dropped[value]`` where the value is dropped and, in the end,
  asked for by autograd or by a recipe that runs: then its op does run again;
- ``later[j, op]`` be 1 where it runs again after op ``t_j`` has begun, and ``absent[j, value]`` where it does so and
  the value is one of those dropped: the value is then not in memory at ``t_j`` for autograd or for any recipe;
- ``held[j, value]`` be 1 where the value is in memory at ``t_j`` for the sake of a recipe that runs after it.

Every plan, with what the simulator says of it, fulfils these rows (the numbers in the comments below):

1. A value is dropped, or absent, only where its op runs, or runs later.
2. What runs after ``t_j+1`` runs after ``t_j``, and what is absent then was absent before.
3. An op runs once. Where one of its values is dropped and here by ``t_j``, the op has run; all that it makes is here.
4. A recipe that has run by ``t_j`` found its inputs: those that are dropped are not absent any more.
5. A recipe that runs after ``t_j`` finds its inputs: each is absent (and comes later), or held.
6. An op in place runs again only where what it rewrites is dropped too.
7. Live at ``t_j`` are: what the program itself refers to and what cannot be dropped; each value that autograd has saved
   and not let go of yet, unless it is absent; what is held. Together they are within the budget. A value whose first
   read is past cannot be absent, because its op runs before that read.

So the least seconds of any point, whole or fractional, are no more than those of any plan within the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from memfit.planning.candidates.enumeration import values_that_matter
from memfit.planning.step import NEVER, Step
from memfit.planning.step.block_values import is_statistic

Numbers = npt.NDArray[np.float64]
Terms = list[tuple[int, float]]


class Program(NamedTuple):
    """Rows ``matrix · x ≤ fixed + per_budget_unit · budget / unit_bytes`` and where the decisions are in ``x``."""

    matrix: csr_array
    fixed: Numbers
    per_budget_unit: Numbers
    seconds: Numbers
    dropped: dict[int, int]

    @property
    def num_rows(self) -> int:
        """The size that solving time depends on."""
        return len(self.fixed)


class ReplayModel:
    """What the rows of one step are made from, for any times."""

    def __init__(self, step: Step, may_be_recomputed: Set[int], *, leave_out_statistics: bool = False) -> None:
        self.step = step
        droppable = {
            value
            for value in values_that_matter(step, frozenset(may_be_recomputed))
            if starts_from_new(step, value, may_be_recomputed)
        }
        # A value that is left out takes no memory and is always there, which no plan can do better.
        self.left_out = self._statistics_beside(droppable) if leave_out_statistics else set()
        self.droppable = frozenset(droppable - self.left_out)
        self.recipes = sorted({step.value_op[value] for value in self.droppable})
        self.outputs = {op: [value for value in step.op_outputs[op] if value in self.droppable] for op in self.recipes}
        self.readers: dict[int, list[int]] = {}
        for op in self.recipes:
            for value in step.op_inputs[op]:
                if step.value_op[value] >= 0 and value not in self.left_out:
                    self.readers.setdefault(value, []).append(op)
        self.first_read = [NEVER if rank == NEVER else step.read_times[rank] for rank in step.read_rank_of_value]
        self._find_latest_runs()
        self.certain_end_of_storage = list(step.natural_end_of_storage)
        for value, storage in enumerate(step.value_storage):
            if value not in droppable:
                end = max(self.certain_end_of_storage[storage], step.last_release_of_value[value])
                self.certain_end_of_storage[storage] = end
        self.unit_bytes = float(max((step.value_bytes[value] for value in self.droppable), default=1) or 1)

    def _statistics_beside(self, droppable: set[int]) -> set[int]:
        """Return the statistics of ops that also have something larger to drop, but for what is written over."""
        step = self.step
        larger = {step.value_op[value] for value in droppable if not is_statistic(step, value)}
        rewritten = set(step.rewritten_input_of_op)
        return {
            value for value in droppable - rewritten if is_statistic(step, value) and step.value_op[value] in larger
        }

    def _find_latest_runs(self) -> None:
        """Find the latest read for which each recipe can run: the first of its own values, or a reader's."""
        self.latest_of_value: dict[int, int] = {}
        self.latest_of_recipe: dict[int, int] = {}
        for op in reversed(self.recipes):
            for value in self.outputs[op]:
                latest = self.first_read[value]
                if latest == NEVER:
                    latest = max((self.latest_of_recipe[reader] for reader in self.readers.get(value, ())), default=-1)
                self.latest_of_value[value] = latest
            self.latest_of_recipe[op] = max(self.latest_of_value[value] for value in self.outputs[op])

    def program(self, times: Iterable[int]) -> Program:
        """Return the rows for these op indices."""
        rows = _Rows(self)
        for time in sorted(set(times)):
            rows.look_at(time)
        return rows.program()


def starts_from_new(step: Step, value: int, may_be_recomputed: Set[int]) -> bool:
    """An op in place starts from what is dropped itself, all the way back to an op that makes something new."""
    while value >= 0:
        if value not in may_be_recomputed:
            return False
        value = step.rewritten_input_of_op[step.value_op[value]]
    return True


class _Layer(NamedTuple):
    """The variables of one time: which recipe runs later, and which value is absent."""

    later: dict[int, int]
    absent: dict[int, int]


class _Rows:
    """Rows in the making. The numbers in comments are those of the docstring above."""

    def __init__(self, model: ReplayModel) -> None:
        self._model = model
        self._step = model.step
        self._first_read_time = min(self._step.read_times, default=self._step.num_ops)
        self._entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self._fixed: list[float] = []
        self._per_budget_unit: list[float] = []
        self._num_variables = 0
        self._replayed = {op: self._variable() for op in model.recipes}
        self._start = _Layer(self._replayed, self._absent(self._replayed, lambda value: True))
        self._last = self._start
        for op in model.recipes:
            rewritten = self._step.rewritten_input_of_op[op]
            if rewritten >= 0:
                self._at_most([(self._replayed[op], 1), (self._start.absent[rewritten], -1)], 0)  # 6
            if len(model.outputs[op]) > 1:
                # An op that runs does so for one of its values.
                runs_for = [(self._start.absent[value], -1.0) for value in model.outputs[op]]
                self._at_most([(self._replayed[op], 1), *runs_for], 0)

    def program(self) -> Program:
        rows, columns, numbers = self._entries
        seconds = np.zeros(self._num_variables)
        for op, at in self._replayed.items():
            seconds[at] = self._step.replay_seconds[op]
        matrix = csr_array((numbers, (rows, columns)), shape=(len(self._fixed), self._num_variables), dtype=np.float64)
        return Program(matrix, np.array(self._fixed), np.array(self._per_budget_unit), seconds, self._start.absent)

    def look_at(self, time: int) -> None:
        """Add the variables and rows of one time; times come in order."""
        layer = self._start if time < self._first_read_time else self._next_layer(time)
        model, step = self._model, self._step
        always, certain = self._always_live(time)
        always += int(step.workspace_bytes[time])
        terms: Terms = []
        for value in self._made_until(time, certain):
            num_bytes = step.value_bytes[value]
            if self._is_waited_for(value, time):
                always += num_bytes
                if model.first_read[value] > time:
                    terms.append((layer.absent[value], -num_bytes))
                continue
            readers = [layer.later[op] for op in model.readers.get(value, ()) if op in layer.later]
            if readers:
                terms.append((self._held_for(readers, layer.absent.get(value)), num_bytes))
        self._within_budget(always, terms)  # 7

    def _next_layer(self, time: int) -> _Layer:
        model, last = self._model, self._last
        later = {op: self._variable() for op in last.later if model.latest_of_recipe[op] > time}
        for op, at in later.items():
            self._at_most([(at, 1), (last.later[op], -1)], 0)  # 2
        absent = self._absent(later, lambda value: model.latest_of_value[value] > time)
        for value, at in absent.items():
            if len(model.outputs[self._step.value_op[value]]) > 1:
                self._at_most([(at, 1), (last.absent[value], -1)], 0)  # 2
            for reader in model.readers.get(value, ()):
                has_run = [(self._replayed[reader], 1.0)]
                if reader in later:
                    has_run.append((later[reader], -1.0))
                self._at_most([(at, 1.0), *has_run], 1)  # 4
        for op, at in later.items():
            if len(model.outputs[op]) > 1:
                for value in model.outputs[op]:
                    not_here = [(absent[value], -1.0)] if value in absent else []
                    self._at_most([(at, 1.0), (self._start.absent[value], 1.0), *not_here], 1)  # 3
        self._last = _Layer(later, absent)
        return self._last

    def _absent(self, later: dict[int, int], is_possible: Callable[[int], bool]) -> dict[int, int]:
        """Return the variables of values; where an op has but one to make, it is that of the op."""
        absent: dict[int, int] = {}
        for op, at in later.items():
            outputs = self._model.outputs[op]
            for value in filter(is_possible, outputs):
                absent[value] = at if len(outputs) == 1 else self._variable()
                if len(outputs) > 1:
                    self._at_most([(absent[value], 1), (at, -1)], 0)  # 1
        return absent

    def _always_live(self, time: int) -> tuple[int, set[int]]:
        """Return the bytes, and the storages, that are live at ``time`` under every plan."""
        step, total = self._step, self._step.resident_bytes
        certain: set[int] = set()
        for storage, start in enumerate(step.storage_start):
            if start <= time and self._model.certain_end_of_storage[storage] >= time:
                certain.add(storage)
                total += step.storage_bytes[storage] if start >= 0 else 0  # The others are resident.
        return total, certain

    def _made_until(self, time: int, certain: set[int]) -> Iterable[int]:
        """Return the values that can be live then beside the certain storages."""
        step, model = self._step, self._model
        return (
            value
            for value in sorted(model.droppable | model.readers.keys())
            if 0 <= step.value_op[value] <= time and step.value_storage[value] not in certain
        )

    def _is_waited_for(self, value: int, time: int) -> bool:
        """Return whether autograd has not let go of it by then, and it may be dropped until it is read."""
        model, step = self._model, self._step
        is_read = model.first_read[value] < NEVER
        return value in model.droppable and is_read and step.last_release_of_value[value] >= time

    def _held_for(self, readers: list[int], absent: int | None) -> int:
        held = self._variable()
        not_absent = [(absent, -1.0)] if absent is not None else []
        for reader in readers:
            self._at_most([(reader, 1.0), (held, -1.0), *not_absent], 0)  # 5
        return held

    def _within_budget(self, always_bytes: int, terms: Terms) -> None:
        unit = self._model.unit_bytes
        self._at_most([(at, number / unit) for at, number in terms], -always_bytes / unit, per_budget_unit=1.0)

    def _variable(self) -> int:
        self._num_variables += 1
        return self._num_variables - 1

    def _at_most(self, terms: Terms, limit: float, *, per_budget_unit: float = 0.0) -> None:
        rows, columns, numbers = self._entries
        for at, number in terms:
            rows.append(len(self._fixed))
            columns.append(at)
            numbers.append(number)
        self._fixed.append(limit)
        self._per_budget_unit.append(per_budget_unit)
