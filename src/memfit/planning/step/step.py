"""A profile as the planner's inner loops want it: lists of numbers by index, looked up once and never changed."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memfit.graph.model_profile import ModelProfile, Phase, RecordedValue, Replay, Save
from memfit.graph.outline import StepOutline, outline_of
from memfit.planning.step.passes import AlikeValues, Passes
from memfit.planning.step.ragged import Ragged
from memfit.planning.step.recording import RecordingChoice
from memfit.planning.step.step_time import StepTime

Bytes = npt.NDArray[np.int64]

NEVER = 2**60
"""A time later than every op, for what is never read and never run."""


class Step:
    """The numbers of one profiled step. Lists are by value, op or storage index, as their names say; -1 is none.

    Times are op indices. ``read_rank_of_value`` is the place of a value's first read among all reads of the step, which
    happen in the order of the ops they precede; ``read_times`` turns a rank back into an op index.
    ``natural_end_of_storage`` is until when a storage lives under every plan.
    ``has_met_allocator`` says that the step ran on a device whose allocator counts more than these bytes.
    ``content_end_of_value`` is the last op during which the value is what its storage holds and the engine records.
    """

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        ops, values = profile.ops, profile.values
        self.num_ops, self.num_values = len(ops), len(values)
        self.op_inputs = [op.inputs for op in ops]
        self.op_outputs = [tuple(output for output in op.outputs if output is not None) for op in ops]
        self.op_seconds = [op.seconds for op in ops]
        self.replay_seconds = [op.seconds if op.replay_seconds is None else op.replay_seconds for op in ops]
        self.workspace_bytes: Bytes = np.array([op.workspace_bytes for op in ops], dtype=np.int64)
        self.has_met_allocator = profile.device.startswith("cuda") and profile.host is not None
        self.value_bytes = [value.num_bytes for value in values]
        self.value_op = [-1 if value.op_index is None else value.op_index for value in values]
        self.value_storage = [value.storage for value in values]
        self.passes = Passes(profile)
        # What the loss or a later forward pass saves is kept by autograd, whatever a plan says: the engine records each
        # pass of the model by itself.
        saves = [tuple(save for save in each.saves if self._is_in_pass(save, each)) for each in values]
        self.saves_of_value = saves
        self.last_release_of_value = [max((save.released_after for save in each), default=-1) for each in saves]
        reads = sorted((save.read_before, save.read_place, index) for index, each in enumerate(saves) for save in each)
        self.read_times = [time for time, _, _ in reads]
        self.read_rank_of_value = [NEVER] * len(values)
        for rank in range(len(reads) - 1, -1, -1):
            time, _, value = reads[rank]
            if time < self.num_ops:
                self.read_rank_of_value[value] = rank
        self._index_storages()
        self._index_writes()
        self._index_arrays()

    def _index_storages(self) -> None:
        values = self.profile.values
        num_storages = max(self.value_storage, default=-1) + 1
        self.values_of_storage: list[list[int]] = [[] for _ in range(num_storages)]
        self.storage_bytes = [0] * num_storages
        self.storage_start = [NEVER] * num_storages
        self.natural_end_of_storage = [-1] * num_storages
        for index, value in enumerate(values):
            storage = value.storage
            self.values_of_storage[storage].append(index)
            self.storage_bytes[storage] = max(self.storage_bytes[storage], self.value_bytes[index])
            self.storage_start[storage] = min(self.storage_start[storage], self.value_op[index])
            natural_end = self.num_ops if value.dies_after is None else max(value.dies_after, self.value_op[index])
            kept_until = [save.released_after for save in value.saves if not self._is_in_pass(save, value)]
            self.natural_end_of_storage[storage] = max(self.natural_end_of_storage[storage], natural_end, *kept_until)
        self.resident_bytes = sum(
            num_bytes for num_bytes, start in zip(self.storage_bytes, self.storage_start, strict=True) if start < 0
        )

    def _index_writes(self) -> None:
        """Note which op writes over what, and until when a replay record is kept for what a storage holds."""
        ops, values = self.profile.ops, self.profile.values
        passes = self.passes
        self.close_time = max((i for i, op in enumerate(ops) if op.module is not None), default=-1)
        self.overwritten_at = [NEVER] * len(values)
        # The value that an op rewrites in place and reads, whose buffer its replay may take over.
        self.rewritten_input_of_op = [-1] * self.num_ops
        for index, op in enumerate(ops):
            if op.phase is not Phase.FORWARD:
                continue
            for value in op.rewrites:
                self.overwritten_at[value] = min(self.overwritten_at[value], index)
            if op.rewrites and op.rewrites[0] in op.inputs:
                self.rewritten_input_of_op[index] = op.rewrites[0]
        self.content_end_of_value = [
            min(
                self.overwritten_at[i],
                self.natural_end_of_storage[value.storage],
                passes.ends[passes.of_op[op]] if op >= 0 and passes.of_op[op] >= 0 else self.close_time,
            )
            for i, (value, op) in enumerate(zip(values, self.value_op, strict=True))
        ]

    def _index_arrays(self) -> None:
        """Repeat as arrays what the simulator looks up for many values in one call."""

        def array(numbers: Sequence[int]) -> Bytes:
            return np.array(numbers, dtype=np.int64)

        self.inputs, self.outputs = Ragged(self.op_inputs), Ragged(self.op_outputs)
        self.reads_at, self.num_saves = array(self.read_times), array([len(saves) for saves in self.saves_of_value])
        self.bytes_of_value, self.bytes_of_storage = array(self.value_bytes), array(self.storage_bytes)
        self.storage_of_value, self.natural_ends = array(self.value_storage), array(self.natural_end_of_storage)
        self.releases_at, self.rewritten_at = array(self.last_release_of_value), array(self.overwritten_at)
        self.rewritten_inputs = array(self.rewritten_input_of_op)
        starts = array(self.storage_start)
        self.made_storages: Bytes = np.flatnonzero((starts >= 0) & (starts < NEVER))
        self.made_bytes: Bytes = np.zeros(self.num_ops, dtype=np.int64)
        np.add.at(self.made_bytes, starts[self.made_storages], self.bytes_of_storage[self.made_storages])

    @cached_property
    def natural_bytes(self) -> Bytes:
        """What is live at each op under every plan, because the program itself refers to it; workspaces included."""
        return self.live_bytes(self.natural_ends) + self.workspace_bytes

    def live_bytes(self, ends: Bytes) -> Bytes:
        """Return what is live at each op, without workspaces, where storages live until ``ends``."""
        change, made = np.append(self.made_bytes, [0, 0]), self.made_storages
        np.subtract.at(change, np.minimum(ends[made], self.num_ops) + 1, self.bytes_of_storage[made])
        live_bytes: Bytes = change.cumsum()[: self.num_ops] + self.resident_bytes
        return live_bytes

    @property
    def last_time_before_reads(self) -> int:
        """The last op before the backward pass reads anything: then all that is saved is held."""
        return max(min(self.read_times, default=self.num_ops) - 1, 0)

    @cached_property
    def recording(self) -> RecordingChoice:
        """What the engine records for each plan."""
        return RecordingChoice(self.profile)

    @cached_property
    def outline(self) -> StepOutline:
        """The op calls of the forward pass, by which the engine finds values."""
        return outline_of(self.profile)

    @cached_property
    def time(self) -> StepTime:
        """How long the step takes under each plan."""
        return StepTime(self.profile, self.recording)

    @cached_property
    def plannable(self) -> tuple[int, ...]:
        """The values that were made inside the model, in the order in which they were."""
        return tuple(
            index for index, op in enumerate(self.value_op) if op >= 0 and self.profile.ops[op].module is not None
        )

    @cached_property
    def may_be_recomputed(self) -> frozenset[int]:
        """The plannable values that the engine can replay bit-exactly, given what they were made from."""
        later = self.passes.values_read_later(self.profile)
        recordable = (i for i in self.plannable if i not in later and self.passes.of_op[self.value_op[i]] >= 0)
        return self.alike.without_parts(frozenset(index for index in recordable if self._may_be_recomputed(index)))

    @cached_property
    def alike(self) -> AlikeValues:
        """Which values share a decision, wherever the engine records."""
        paths = self.recording.paths if len(self.passes.ends) > 1 else ()
        return AlikeValues(self.profile, self.outline, paths)

    @cached_property
    def saved(self) -> frozenset[int]:
        """The values that autograd saves inside the model."""
        return frozenset(index for index, saves in enumerate(self.saves_of_value) if saves)

    @cached_property
    def _values_made_from(self) -> list[list[int]]:
        """For each value, those that ops of the forward pass make from it."""
        made: list[list[int]] = [[] for _ in range(self.num_values)]
        for op, inputs, outputs in zip(self.profile.ops, self.op_inputs, self.op_outputs, strict=True):
            if op.phase is Phase.FORWARD:
                for value in inputs:
                    made[value].extend(outputs)
        return made

    def _may_be_recomputed(self, index: int) -> bool:
        ops, value = self.profile.ops, self.profile.values[index]
        op = ops[self.value_op[index]]
        if op.replay is not Replay.YES or not value.replays_exactly:
            return False
        # Parts of one storage that are written and saved apart (an LSTM's gates, after unsafe_split) count versions
        # apart too, and the engine, which compares versions, keeps such a storage.
        neighbours = self.values_of_storage[value.storage]
        if any(self.saves_of_value[other] and self.overwritten_at[other] < NEVER for other in neighbours):
            return False
        # Of several tensors that one op writes into, the engine makes a replay record for the first.
        return not op.rewrites or index == op.outputs[0]

    def _is_in_pass(self, save: Save, value: RecordedValue) -> bool:
        """Return whether the save happens in the forward pass that made the value; in any, where none did."""
        of_op = self.passes.of_op
        if save.op_index is None or of_op[save.op_index] < 0:
            return save.op_index is None
        return value.op_index is None or of_op[value.op_index] == of_op[save.op_index]

    def droppable_of(self, may_be_recomputed: Set[int]) -> frozenset[int]:
        """Return those of the values that can be replayed where nothing that they are made from is held.

        An op in place starts from what is dropped itself, all the way back to an op that makes something new.
        """
        droppable: set[int] = set()
        for value in sorted(may_be_recomputed):
            rewritten = self.rewritten_input_of_op[self.value_op[value]]
            if rewritten < 0 or rewritten in droppable:
                droppable.add(value)
        return frozenset(droppable)

    def recomputed_of(self, wanted: Set[int]) -> set[int]:
        """Return those of the ``wanted`` values that the engine can replay, and that a backward pass may need.

        What autograd does not save is replayed only for the sake of a replay that starts from it. Without one,
        dropping it frees nothing, and its replay record holds what it was made from: the engine in C++ learns only from
        its next call that a storage is freed. What one pass needs is dropped in the others, too.
        """
        droppable = self.droppable_among(wanted)
        starts, needed = self._values_made_from, set(droppable & self.saved)
        while True:
            for index in sorted(droppable - needed, reverse=True):
                if not needed.isdisjoint(starts[index]):
                    needed.add(index)
            others = droppable & self.alike.with_others(needed)
            if others <= needed:
                return needed
            needed |= others

    def droppable_among(self, wanted: Set[int]) -> set[int]:
        """Return those of the ``wanted`` values that the engine can replay, whether or not anything needs them."""
        recomputed: Set[int] = wanted & self.may_be_recomputed
        while (remaining := self.alike.without_parts(self._without_writes_to_held(recomputed))) != recomputed:
            recomputed = remaining
        return set(remaining)

    def _without_writes_to_held(self, recomputed: Set[int]) -> set[int]:
        if all(self.rewritten_input_of_op[self.value_op[index]] < 0 for index in recomputed):
            return set(recomputed)
        kept: set[int] = set()
        for index in sorted(recomputed):
            op = self.profile.ops[self.value_op[index]]
            # An op that worked in place on something held would need a copy of that, no smaller than its result.
            if not any(value in op.inputs and value not in kept for value in op.rewrites):
                kept.add(index)
        return kept
