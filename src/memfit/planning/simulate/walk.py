"""Walks a profiled step under given decisions: which recipes run when, and what is live at each point.

The engine's rules (``runtime.values``) fix when each buffer comes and goes, so that the whole step is a set of
intervals. A *recipe* is an op of the forward pass with a recomputed output.

- A recipe runs at most once: just before the backward pass first reads one of its recomputed outputs, or when a later
  recipe that needs one of them runs. Recipes that run for one read run in the order of the forward pass.
- A recipe keeps what it starts from until it has run; one that never runs, until nobody can ask for its outputs. A
  value written over in the meantime is copied first.
- A run makes all outputs of the op. Those that are recomputed stay until autograd has let go of them and the recipes
  that start from them have run; the others go at once. An op in place works in the buffer of what it rewrites where
  nobody else has a use for that.
- An offloaded value has a recipe that starts from nothing: its bytes come back from the host. When its memory goes, and
  from when on there is memory for it again, is told by ``copy_schedule``.

The runs are put between the ops of the recorded step; memory at each point is a running sum over where intervals begin
and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import cached_property
from typing import NamedTuple

import numpy as np

from memfit.graph.model_profile import Phase
from memfit.planning.simulate.copy_schedule import CopySchedule, Runs
from memfit.planning.simulate.traffic import Buffer, Traffic
from memfit.planning.step import NEVER, Bytes, Step
from memfit.planning.step.link_time import NO_WAITING, Waiting
from memfit.planning.step.offload_rules import NOTHING_OFFLOADED, Offloading

BEFORE_THE_STEP = "(weights, optimizer state and batch)"
LOSS = "(loss)"
BACKWARD_PASS = "(backward pass)"
OPTIMIZER_STEP = "(optimizer step)"


class LiveBytes(NamedTuple):
    """How much of what is live at some point was made in ``module``."""

    module: str
    num_bytes: int


class Absence(NamedTuple):
    """The positions, up to the one before ``end``, at which a dropped value takes none of its bytes."""

    begin: int
    end: int
    num_bytes: int


class RecipeRun(NamedTuple):
    """Dropped values that come back together: made again by ``op``, or from the host where that is None."""

    op: int | None
    values: tuple[int, ...]
    absences: tuple[Absence, ...]


class Walk:
    """The step under one plan. Positions count the recorded ops and the runs of recipes between them.

    ``_dropped`` are the recomputed and the offloaded values. Recipes go by the number of their op, and those of
    offloaded values, which have no inputs and one output, by numbers from there on, in the order in which the values
    leave.
    """

    def __init__(self, step: Step, recomputed: Set[int], offloading: Offloading = NOTHING_OFFLOADED) -> None:
        self._step = step
        self._dropped = recomputed
        self._op_inputs, self._op_outputs = step.op_inputs, step.op_outputs
        self._sent = sorted(offloading.values, key=lambda value: (step.value_op[value], value))
        recipes = sorted({step.value_op[value] for value in recomputed}, reverse=True)
        if self._sent:
            self._dropped = recomputed | offloading.values
            self._op_inputs = [*step.op_inputs, *(() for _ in self._sent)]
            self._op_outputs = [*step.op_outputs, *((value,) for value in self._sent)]
            recipes = [*recipes, *range(step.num_ops, step.num_ops + len(self._sent))]
        self._order_runs(recipes)
        self._place_runs()
        self._find_holds(recipes)
        self._copies = self._scheduled_copies(offloading)
        # What takes memory beside the recorded storages: (value, first position, last position) of each replayed output
        # and each copy of what was written over.
        self._buffers: list[tuple[int, int, int]] = []
        self._copy_what_is_written_over()
        self._fill_replayed()
        self._end_storages()
        self.memory_bytes = self._summed()

    @property
    def peak_bytes(self) -> int:
        return int(self.memory_bytes.max(initial=self._step.resident_bytes))

    @cached_property
    def replayed_ops(self) -> list[int]:
        if not self._sent:
            return self._run_recipes
        return [recipe for recipe in self._run_recipes if recipe < self._step.num_ops]

    def _op_of(self, recipe: int) -> int:
        num_ops = self._step.num_ops
        return recipe if recipe < num_ops else self._step.value_op[self._sent[recipe - num_ops]]

    @property
    def recompute_seconds(self) -> float:
        seconds = self._step.replay_seconds
        return sum(seconds[op] for op in self.replayed_ops)

    @property
    def added_seconds(self) -> float:
        num_runs, num_sent = len(self._run_recipes), len(self._sent)
        return self._step.time.added(self._dropped, num_runs, self.recompute_seconds, num_sent, self.waiting)

    @cached_property
    def waiting(self) -> Waiting:
        """How long the device waits for copies; not at all where the link is not known."""
        step, link = self._step, self._step.profile.link
        if link is None or self._copies is None:
            return NO_WAITING
        seconds = np.zeros(step.num_ops + len(self._run_recipes) + 1)
        seconds[self.position_of_op + 1] = step.op_seconds
        is_replay = np.array(self._run_recipes) < step.num_ops
        seconds[self._run_positions[is_replay] + 1] = [step.replay_seconds[op] for op in self.replayed_ops]
        return self._copies.waiting(link, np.cumsum(seconds).tolist(), step.profile.unthrottled_share)

    def _order_runs(self, recipes: list[int]) -> None:
        """Find which recipes run, for which read, and how long the others can be asked for.

        Among ``recipes``, those that start from a value come before the one that brings it back.
        """
        step, recomputed = self._step, self._dropped
        rank_asked = list(step.read_rank_of_value)
        asked_until: dict[int, int] = {}
        self._idle_until: dict[int, int] = {}
        runs: list[tuple[int, int, int]] = []
        op_outputs, op_inputs = self._op_outputs, self._op_inputs
        for op in recipes:
            rank = NEVER
            for value in op_outputs[op]:
                if rank_asked[value] < rank and value in recomputed:
                    rank = rank_asked[value]
            if rank < NEVER:
                runs.append((rank, self._op_of(op), op))
                for value in op_inputs[op]:
                    if rank < rank_asked[value]:
                        rank_asked[value] = rank
                continue
            until = -1
            for value in op_outputs[op]:
                if value in recomputed:
                    asked = asked_until.get(value, -1)
                    until = max(until, step.content_end_of_value[value], step.last_release_of_value[value], asked)
            self._idle_until[op] = until
            for value in op_inputs[op]:
                if until > asked_until.get(value, -1):
                    asked_until[value] = until
        runs.sort()
        self._run_times = [step.read_times[rank] for rank, _, _ in runs]
        self._run_ranks = [rank for rank, _, _ in runs]
        self._run_recipes = [recipe for _, _, recipe in runs]

    def _place_runs(self) -> None:
        num_ops = self._step.num_ops
        times = np.array(self._run_times, dtype=np.int64)
        self._run_positions: Bytes = times + np.arange(len(times))
        ops = np.arange(num_ops)
        self.position_of_op = ops + np.searchsorted(times, ops, side="right")
        # Plain integers are faster to reach one by one. What outlives the step ends behind the last position.
        self._position_of = [*self.position_of_op.tolist(), num_ops + len(self._run_recipes)]

    def _find_holds(self, recipes: list[int]) -> None:
        """Find the last position at which a recipe still holds or reads each value."""
        end_of = {op: self._position_of[until] for op, until in self._idle_until.items()}
        for number, (op, time) in enumerate(zip(self._run_recipes, self._run_times, strict=True)):
            end_of[op] = time + number
        self._held_until: dict[int, int] = {}
        held_until, op_inputs = self._held_until, self._op_inputs
        for op in recipes:
            end = end_of[op]
            for value in op_inputs[op]:
                if end > held_until.get(value, -1):
                    held_until[value] = end

    def _scheduled_copies(self, offloading: Offloading) -> CopySchedule | None:
        if not offloading.values:
            return None
        ranks, recipes = (np.array(numbers, dtype=np.int64) for numbers in (self._run_ranks, self._run_recipes))
        runs = Runs(ranks, self._run_positions, np.maximum(recipes - self._step.num_ops, -1))
        return CopySchedule(self._step, self._sent, offloading.window_bytes, runs, self._position_of)

    def _copy_what_is_written_over(self) -> None:
        """Let recipes hold a copy of what an op of the forward pass writes over; only then does it take memory."""
        step = self._step
        for value, end in self._held_until.items():
            written_at = step.overwritten_at[value]
            if written_at < NEVER and value not in self._dropped and end >= written_at:
                self._buffers.append((value, written_at, end))

    def _fill_replayed(self) -> None:
        step, recomputed, position_of, held_until = self._step, self._dropped, self._position_of, self._held_until
        last_release, op_outputs, buffers = step.last_release_of_value, self._op_outputs, self._buffers
        taken_over = self._taken_over()
        arrives_from = {} if self._copies is None else self._copies.arrives_from
        for number, (op, time) in enumerate(zip(self._run_recipes, self._run_times, strict=True)):
            position = time + number
            for value in op_outputs[op]:
                end = position
                if value in recomputed:
                    held = held_until.get(value, -1)
                    if held > end:
                        end = held
                    released = last_release[value]
                    if released >= time and position_of[released] > end:
                        end = position_of[released]
                    if value in taken_over:
                        end -= 1
                buffers.append((value, arrives_from.get(value, position), end))

    def _taken_over(self) -> set[int]:
        """Return the replayed values in whose buffer an op in place works: it is the only one to use them."""
        step = self._step
        rewritten = [step.rewritten_input_of_op[op] for op in self.replayed_ops if step.rewritten_input_of_op[op] >= 0]
        if not rewritten:
            return set()
        num_uses = dict.fromkeys(rewritten, 0)
        for op in (*self._run_recipes, *self._idle_until):
            for value in self._op_inputs[op]:
                if value in num_uses:
                    num_uses[value] += 1
        return {value for value, uses in num_uses.items() if uses + step.num_saves_of_value[value] == 1}

    def _end_storages(self) -> None:
        """Find the storages that end elsewhere than in the plain step, and where."""
        step, recomputed, position_of, held_until = self._step, self._dropped, self._position_of, self._held_until
        value_storage, overwritten_at = step.value_storage, step.overwritten_at
        last_release, natural_end = step.last_release_of_value, step.natural_end_of_storage
        leaves_until = {} if self._copies is None else self._copies.leaves_until
        touched = {value_storage[value] for value in recomputed}
        touched.update([value_storage[value] for value in held_until if value not in recomputed])
        self._end_of_storage: dict[int, int] = {}
        for storage in touched:
            if step.storage_start[storage] < 0:
                continue
            end = position_of[natural_end[storage]]
            for value in step.values_of_storage[storage]:
                if value not in recomputed:
                    if last_release[value] >= 0 and position_of[last_release[value]] > end:
                        end = position_of[last_release[value]]
                    held = held_until.get(value, -1)
                    if end < held < overwritten_at[value]:
                        end = held
                elif value in leaves_until:
                    end = max(end, leaves_until[value])
            self._end_of_storage[storage] = end

    def _summed(self) -> Bytes:
        """Return what is live at each position, workspaces included."""
        step, position_of = self._step, self._position_of
        num_positions = step.num_ops + len(self._run_recipes)
        plain = np.zeros(num_positions + 2, dtype=np.int64)
        plain[self.position_of_op] = step.made_bytes
        plain[np.array(position_of, dtype=np.int64) + 1] -= step.freed_bytes
        change: list[int] = plain.tolist()
        storage_bytes, value_bytes, plain_end = step.storage_bytes, step.value_bytes, step.plain_end_of_storage
        for storage, end in self._end_of_storage.items():
            num_bytes = storage_bytes[storage]
            change[position_of[plain_end[storage]] + 1] += num_bytes
            change[end + 1] -= num_bytes
        for value, first, last in self._buffers:
            num_bytes = value_bytes[value]
            change[first] += num_bytes
            change[last + 1] -= num_bytes
        memory: Bytes = np.cumsum(np.array(change[:num_positions], dtype=np.int64)) + step.resident_bytes
        memory[self.position_of_op] += step.workspace_bytes
        if self._run_recipes:
            memory[self._run_positions] += self._workspaces_of_runs()
        return memory

    def _workspaces_of_runs(self) -> Bytes:
        workspaces = self._step.workspace_bytes
        if self._sent:
            workspaces = np.concatenate([workspaces, np.zeros(len(self._sent), dtype=np.int64)])
        of_runs: Bytes = workspaces[self._run_recipes]
        return of_runs

    def runs(self) -> Iterator[RecipeRun]:
        """Yield what comes back together, and when it takes no memory: from where its storage ends until it is back."""
        step = self._step
        arrives_from = {} if self._copies is None else self._copies.arrives_from
        for run_position, recipe in zip(self._run_positions.tolist(), self._run_recipes, strict=True):
            values = tuple(value for value in self._op_outputs[recipe] if value in self._dropped)
            absent = []
            for value in values:
                # A storage from before the step is always there.
                end = self._end_of_storage.get(step.value_storage[value], NEVER)
                back = arrives_from.get(value, run_position)
                if end + 1 < back:
                    absent.append(Absence(end + 1, back, step.value_bytes[value]))
            yield RecipeRun(recipe if recipe < step.num_ops else None, values, tuple(absent))

    def traffic(self) -> Traffic:
        """Return the buffers and workspaces of the step, at their positions."""
        step = self._step
        buffers = [Buffer(step.storage_bytes[storage], *lifetime) for storage, lifetime in self._storages_made()]
        buffers += [Buffer(step.value_bytes[value], first, last) for value, first, last in self._buffers]
        workspaces = np.zeros(step.num_ops + len(self._run_recipes), dtype=np.int64)
        workspaces[self.position_of_op] = step.workspace_bytes
        if self._run_recipes:
            workspaces[self._run_positions] = self._workspaces_of_runs()
        return Traffic(buffers, workspaces.tolist())

    def _storages_made(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield each storage that the step makes, with the first and the last position at which it lives."""
        for storage, start in enumerate(self._step.storage_start):
            if 0 <= start < NEVER:
                end = self._position_of[self._step.plain_end_of_storage[storage]]
                yield storage, (self._position_of[start], self._end_of_storage.get(storage, end))

    def live_at(self, position: int) -> tuple[LiveBytes, ...]:
        """Return what is live there by the module that made it, the largest first."""
        step = self._step
        by_module: dict[str, int] = {BEFORE_THE_STEP: step.resident_bytes}

        def add(op_index: int, num_bytes: int) -> None:
            op = step.profile.ops[op_index]
            name = op.module if op.module is not None else _NAMES_OUTSIDE[op.phase]
            by_module[name] = by_module.get(name, 0) + num_bytes

        for storage, (first, last) in self._storages_made():
            if first <= position <= last:
                add(step.storage_start[storage], step.storage_bytes[storage])
        for value, first, last in self._buffers:
            if first <= position <= last:
                made_at = step.value_op[value]
                add(made_at if made_at >= 0 else step.overwritten_at[value], step.value_bytes[value])
        op_index = int(np.searchsorted(self.position_of_op, position))
        if step.num_ops and self.position_of_op[op_index] == position:
            add(op_index, int(step.workspace_bytes[op_index]))
        elif step.num_ops:
            number = int(np.searchsorted(self._run_positions, position))
            add(self._op_of(self._run_recipes[number]), int(self._workspaces_of_runs()[number]))
        live = [LiveBytes(module, num_bytes) for module, num_bytes in by_module.items() if num_bytes]
        return tuple(sorted(live, key=lambda entry: -entry.num_bytes))


_NAMES_OUTSIDE = {Phase.FORWARD: LOSS, Phase.BACKWARD: BACKWARD_PASS, Phase.OPTIMIZER: OPTIMIZER_STEP}
