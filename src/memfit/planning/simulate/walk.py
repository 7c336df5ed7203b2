"""One profiled step under given decisions: which ops are replayed when, and what is live at each point.

The engine's rules (``runtime.values``) fix when each buffer is made and freed, so that the whole step is a set of
intervals. Every op of the forward pass with a recomputed output has a *replay record*.

- An op is replayed at most once: just before the backward pass first reads one of its recomputed outputs, or when the
  replay of a later op needs one of them. Replays for one read run in the order of the forward pass.
- A replay record keeps the op's inputs until it has run; one that never runs, until nothing can ask for its outputs. An
  input that is written over in the meantime is copied first.
- A replay makes all outputs of the op. Recomputed ones stay until autograd has released them and the replays that start
  from them have run; the others are freed at once. An op in place works in the buffer of what it rewrites where nothing
  else uses that.
- An offloaded value has a replay record without inputs: its bytes are copied back from the host. ``copy_schedule``
  computes when its memory is freed, and from when on it has memory again.

Memory at each point is a running sum over where intervals begin and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import cached_property
from typing import NamedTuple

import numpy as np

from memfit.graph.model_profile import Phase
from memfit.infeasible_budget import BACKWARD_PASS, BEFORE_THE_STEP, LOSS, OPTIMIZER_STEP, LiveBytes
from memfit.planning.simulate.copy_schedule import CopySchedule
from memfit.planning.simulate.traffic import Buffer, Traffic
from memfit.planning.step import NEVER, Bytes, Step
from memfit.planning.step.offload_rules import NOTHING_OFFLOADED, Offloading
from memfit.planning.step.seconds import NONE, Seconds


class Absence(NamedTuple):
    """The positions, up to the one before ``end``, at which a dropped value takes none of its bytes."""

    begin: int
    end: int
    num_bytes: int


class Restoration(NamedTuple):
    """Recomputed values that are restored together, by the replay of ``op``."""

    op: int
    values: tuple[int, ...]
    absences: tuple[Absence, ...]


class Walk:
    """The step under one plan. Positions count the recorded ops and the replays between them.

    ``_dropped`` are the recomputed and the offloaded values. Replay records go by the number of their op, and those of
    offloaded values by numbers from there on, in the order in which the values are sent.
    """

    def __init__(self, step: Step, recomputed: Set[int], offloading: Offloading = NOTHING_OFFLOADED) -> None:
        self._step = step
        self._sent = sorted(offloading.values, key=lambda value: (step.value_op[value], value))
        self._dropped = recomputed | offloading.values
        self._is_dropped = np.zeros(step.num_values, dtype=bool)
        self._is_dropped[list(self._dropped)] = True
        self._order_runs(sorted({step.value_op[value] for value in recomputed}, reverse=True))
        self._place_runs()
        self._find_holds()
        self._copies: CopySchedule | None = None
        if self._sent:
            fetched = [max(record - step.num_ops, -1) for record in self._run_records]
            runs = list(zip(self._run_ranks, self._run_positions.tolist(), fetched, strict=True))
            position_of = self._position_of.tolist()
            self._copies = CopySchedule(step, self._sent, offloading.window_bytes, runs, position_of)
        self._end_storages()
        self._find_buffers()
        self.memory_bytes = self._summed()

    @property
    def peak_bytes(self) -> int:
        return int(self.memory_bytes.max(initial=self._step.resident_bytes))

    @property
    def peak_position(self) -> int:
        return int(self.memory_bytes.argmax()) if len(self.memory_bytes) else 0

    @property
    def peak_op_index(self) -> int:
        """The op at which, or just before which, most is live."""
        return int(np.searchsorted(self.position_of_op, self.peak_position))

    @cached_property
    def replayed_ops(self) -> list[int]:
        return [record for record in self._run_records if record < self._step.num_ops]

    @cached_property
    def recompute_seconds(self) -> float:
        seconds = self._step.replay_seconds
        return sum([seconds[op] for op in self.replayed_ops])

    @property
    def added_seconds(self) -> float:
        num_runs, num_sent = len(self._run_records), len(self._sent)
        return self._step.time.added(self._dropped, num_runs, self.recompute_seconds, num_sent, self.waiting)

    @cached_property
    def waiting(self) -> Seconds:
        """How long the device waits for copies; not at all where the link is not known."""
        step, link = self._step, self._step.profile.link
        if link is None or self._copies is None:
            return NONE
        seconds = np.zeros(step.num_ops + len(self._run_records) + 1)
        seconds[self.position_of_op + 1] = step.op_seconds
        seconds[self._replay_positions + 1] = [step.replay_seconds[op] for op in self.replayed_ops]
        return self._copies.waiting(link, np.cumsum(seconds).tolist(), step.profile.unthrottled_share)

    def _order_runs(self, ops: list[int]) -> None:
        """Find which replays run, for which read, and until when the outputs of the others can be asked for.

        ``ops`` are those with a replay record, the last one first, so that an op comes after those that start from it.
        """
        step, dropped = self._step, self._dropped
        op_outputs, op_inputs = step.op_outputs, step.op_inputs
        rank_asked = step.read_rank_of_value.copy()
        asked_until: dict[int, int] = {}
        runs: list[tuple[int, int, int]] = []
        self._idle_ops: list[int] = []
        self._idle_until: list[int] = []
        for op in ops:
            rank = NEVER
            for value in op_outputs[op]:
                if rank_asked[value] < rank and value in dropped:
                    rank = rank_asked[value]
            if rank < NEVER:
                runs.append((rank, op, op))
                for value in op_inputs[op]:
                    if rank < rank_asked[value]:
                        rank_asked[value] = rank
                continue
            until = -1
            for value in op_outputs[op]:
                if value in dropped:
                    asked = asked_until.get(value, -1)
                    until = max(until, step.content_end_of_value[value], step.last_release_of_value[value], asked)
            self._idle_ops.append(op)
            self._idle_until.append(until)
            for value in op_inputs[op]:
                if until > asked_until.get(value, -1):
                    asked_until[value] = until
        for number, value in enumerate(self._sent):
            if rank_asked[value] < NEVER:
                runs.append((rank_asked[value], step.value_op[value], step.num_ops + number))
        runs.sort()
        self._run_ranks = [rank for rank, _, _ in runs]
        self._run_records = [record for _, _, record in runs]

    def _place_runs(self) -> None:
        step, num_ops = self._step, self._step.num_ops
        self._run_times: Bytes = step.reads_at[self._run_ranks]
        self._run_positions: Bytes = self._run_times + np.arange(len(self._run_ranks))
        num_before = np.bincount(self._run_times, minlength=num_ops).cumsum()
        self.position_of_op = np.arange(num_ops) + num_before
        # What outlives the step ends behind the last position.
        self._position_of: Bytes = np.append(self.position_of_op, num_ops + len(self._run_ranks))
        records = np.array(self._run_records, dtype=np.int64)
        self._run_is_replay = records < num_ops
        self._replays: Bytes = records[self._run_is_replay]
        self._replay_positions: Bytes = self._run_positions[self._run_is_replay]

    def _find_holds(self) -> None:
        """Find the last position at which a replay record holds or reads each value, and where that is rewritten."""
        step = self._step
        ends = [self._replay_positions, self._position_of[self._idle_until]]
        ops = np.concatenate([self._replays, np.array(self._idle_ops, dtype=np.int64)])
        self._held, places = step.inputs.of(ops)
        self._held_until: Bytes = np.full(step.num_values, -1)
        np.maximum.at(self._held_until, self._held, np.concatenate(ends)[places])
        is_rewritten = step.rewritten_at < NEVER
        self._rewritten_at: Bytes = np.full(step.num_values, NEVER)
        self._rewritten_at[is_rewritten] = self._position_of[step.rewritten_at[is_rewritten]]

    def _end_storages(self) -> None:
        """Find the last position of each storage that the step makes."""
        step = self._step
        releases = np.where(step.releases_at >= 0, self._position_of[step.releases_at], -1)
        held_until = np.where(self._held_until < self._rewritten_at, self._held_until, -1)
        ends = np.where(self._is_dropped, -1, np.maximum(releases, held_until))
        if self._copies is not None:
            for value, until in self._copies.leaves_until.items():
                ends[value] = until
        self._storage_ends: Bytes = self._position_of[step.natural_ends]
        np.maximum.at(self._storage_ends, step.storage_of_value, ends)

    def _find_buffers(self) -> None:
        """Find what takes memory beside the recorded storages: replayed outputs, and copies of what is written over."""
        step = self._step
        values, places = step.outputs.of(self._replays)
        begins = self._replay_positions[places]
        times = self._run_times[self._run_is_replay][places]
        if self._sent:
            is_fetch = ~self._run_is_replay
            fetched = [self._sent[record - step.num_ops] for record in self._run_records if record >= step.num_ops]
            values = np.concatenate([values, np.array(fetched, dtype=np.int64)])
            begins = np.concatenate([begins, self._run_positions[is_fetch]])
            times = np.concatenate([times, self._run_times[is_fetch]])
        releases = step.releases_at[values]
        released = np.where(releases >= times, self._position_of[releases], -1)
        lasts = np.maximum(
            begins, np.where(self._is_dropped[values], np.maximum(released, self._held_until[values]), -1)
        )
        lasts -= self._is_taken_over()[values]
        if self._copies is not None:
            arrives_from = self._copies.arrives_from
            begins = np.array([arrives_from.get(*each) for each in zip(values.tolist(), begins.tolist(), strict=True)])
        copied = np.flatnonzero((self._held_until >= self._rewritten_at) & ~self._is_dropped)
        self._buffer_values: Bytes = np.concatenate([values, copied])
        self._buffer_begins: Bytes = np.concatenate([begins, self._rewritten_at[copied]])
        self._buffer_lasts: Bytes = np.concatenate([lasts, self._held_until[copied]])

    def _is_taken_over(self) -> Bytes:
        """Return for each value whether a replay in place works in its buffer: that is the only one to use it."""
        step = self._step
        is_taken_over: Bytes = np.zeros(step.num_values, dtype=np.int64)
        rewritten = step.rewritten_inputs[self._replays]
        rewritten = rewritten[rewritten >= 0]
        rewritten = rewritten[self._is_dropped[rewritten]]
        if len(rewritten):
            num_uses = np.bincount(self._held, minlength=step.num_values) + step.num_saves
            is_taken_over[rewritten] = num_uses[rewritten] == 1
        return is_taken_over

    def _summed(self) -> Bytes:
        """Return what is live at each position, workspaces included."""
        step = self._step
        num_positions = step.num_ops + len(self._run_records)
        change = np.zeros(num_positions + 2, dtype=np.int64)
        change[self.position_of_op] = step.made_bytes
        buffer_bytes = step.bytes_of_value[self._buffer_values]
        np.add.at(change, self._buffer_begins, buffer_bytes)
        np.subtract.at(change, self._buffer_lasts + 1, buffer_bytes)
        made = step.made_storages
        np.subtract.at(change, self._storage_ends[made] + 1, step.bytes_of_storage[made])
        memory: Bytes = change[:num_positions].cumsum() + step.resident_bytes + self._workspaces()
        return memory

    def _workspaces(self) -> Bytes:
        workspaces = np.zeros(self._step.num_ops + len(self._run_records), dtype=np.int64)
        workspaces[self.position_of_op] = self._step.workspace_bytes
        workspaces[self._replay_positions] = self._step.workspace_bytes[self._replays]
        return workspaces

    def restorations(self) -> Iterator[Restoration]:
        """Yield which values are replayed together, and when they take no memory: until then."""
        step, storage_ends = self._step, self._storage_ends.tolist()
        for position, op in zip(self._replay_positions.tolist(), self.replayed_ops, strict=True):
            values = tuple(value for value in step.op_outputs[op] if value in self._dropped)
            absent = []
            for value in values:
                storage = step.value_storage[value]
                # A storage from before the step is always there.
                if step.storage_start[storage] >= 0 and storage_ends[storage] + 1 < position:
                    absent.append(Absence(storage_ends[storage] + 1, position, step.value_bytes[value]))
            yield Restoration(op, values, tuple(absent))

    def traffic(self) -> Traffic:
        """Return the buffers and workspaces of the step, at their positions."""
        return Traffic([buffer for _, buffer in self._buffers()], self._workspaces().tolist())

    def _buffers(self) -> Iterator[tuple[int, Buffer]]:
        """Yield the op that makes each buffer of the step, and the buffer."""
        step = self._step
        begins, ends = self._position_of.tolist(), self._storage_ends.tolist()
        for storage in step.made_storages.tolist():
            start = step.storage_start[storage]
            yield start, Buffer(step.storage_bytes[storage], begins[start], ends[storage])
        lifetimes = self._buffer_values.tolist(), self._buffer_begins.tolist(), self._buffer_lasts.tolist()
        for value, first, last in zip(*lifetimes, strict=True):
            # A value from before the step is copied by the op that writes over it.
            op = step.value_op[value] if step.value_op[value] >= 0 else step.overwritten_at[value]
            yield op, Buffer(step.value_bytes[value], first, last)

    def live_at(self, position: int) -> tuple[LiveBytes, ...]:
        """Return what is live there by the module that made it, the largest first."""
        step = self._step
        by_module: dict[str, int] = {BEFORE_THE_STEP: step.resident_bytes}

        def add(op_index: int, num_bytes: int) -> None:
            op = step.profile.ops[op_index]
            name = op.module if op.module is not None else _NAMES_OUTSIDE[op.phase]
            by_module[name] = by_module.get(name, 0) + num_bytes

        for op_index, buffer in self._buffers():
            if buffer.first <= position <= buffer.last:
                add(op_index, buffer.num_bytes)
        for ops, positions in ((range(step.num_ops), self.position_of_op), (self._replays, self._replay_positions)):
            for number in np.flatnonzero(positions == position).tolist():
                add(int(ops[number]), int(step.workspace_bytes[ops[number]]))
        live = [LiveBytes(module, num_bytes) for module, num_bytes in by_module.items() if num_bytes]
        return tuple(sorted(live, key=lambda entry: -entry.num_bytes))


_NAMES_OUTSIDE = {Phase.FORWARD: LOSS, Phase.BACKWARD: BACKWARD_PASS, Phase.OPTIMIZER: OPTIMIZER_STEP}
