"""The engine's memory, object by object: the oracle for the simulator.

Nothing is computed here. Buffers, held tensors, dropped values and records are Python objects that refer to each other
as those of ``memfit.runtime`` do, and a buffer takes its bytes off the ledger when the last reference to it is gone.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from memfit.graph.model_profile import ModelProfile, Phase, Save


class Ledger:
    def __init__(self, resident_bytes: int) -> None:
        self.live_bytes = resident_bytes
        self.peak_bytes = resident_bytes
        self.most_during_op = 0

    def note(self, workspace_bytes: int = 0) -> None:
        self.most_during_op = max(self.most_during_op, self.live_bytes + workspace_bytes)
        self.peak_bytes = max(self.peak_bytes, self.most_during_op)


class Buffer:
    def __init__(self, ledger: Ledger, num_bytes: int) -> None:
        self._ledger, self._num_bytes = ledger, num_bytes
        ledger.live_bytes += num_bytes

    def __del__(self) -> None:
        self._ledger.live_bytes -= self._num_bytes


class Storage:
    """A recorded storage; ``dropped`` is what it holds, where that was dropped; ``held`` are those who must copy."""

    def __init__(self, buffer: Buffer | None) -> None:
        self.buffer = buffer
        self.dropped: DroppedValue | None = None
        self.held: list[weakref.ref[HeldTensor]] = []


class HeldTensor:
    def __init__(self, memory: object) -> None:
        self.memory: object | None = memory


class DroppedValue:
    def __init__(self, record: ReplayRecord, value: int) -> None:
        self.record: ReplayRecord | None = record
        self.value = value
        self.buffer: Buffer | None = None
        self.num_uses = 0
        # Of an offloaded value: where it comes back to, before anybody reads it.
        self.arriving: Buffer | None = None


class DroppedUse:
    def __init__(self, dropped: DroppedValue) -> None:
        self.dropped = dropped
        dropped.num_uses += 1


@dataclass
class ReplayRecord:
    """``number`` is the order in which records were written."""

    number: int
    op_index: int
    sources: list[HeldTensor | DroppedUse]
    rewritten: DroppedValue | None = None
    outputs: list[weakref.ref[DroppedValue]] = field(default_factory=list)


class ReferenceEngine:
    def __init__(
        self, profile: ModelProfile, recomputed: set[int], offloaded: frozenset[int] = frozenset(), window: int = 0
    ) -> None:
        self.profile = profile
        self.recomputed = recomputed
        self.offloaded, self.window = offloaded, window
        self.leaving: list[tuple[int, Buffer | None]] = []
        self.sent: list[weakref.ref[DroppedValue]] = []
        outside = {value.storage: value.num_bytes for value in profile.values if value.op_index is None}
        self.ledger = Ledger(sum(outside.values()))
        self.program: dict[int, Storage] = {storage: Storage(None) for storage in outside}
        self.outside = set(outside)
        # Autograd's references, and what they refer to.
        self.saves: list[tuple[Save, int, HeldTensor | DroppedUse]] = []
        self.num_recipes = 0
        self.replayed: list[int] = []
        self.timeline: list[int] = []

    def run(self) -> None:
        ops, values = self.profile.ops, self.profile.values
        last_in_model = max((i for i, op in enumerate(ops) if op.module is not None), default=-1)
        for index, op in enumerate(ops):
            self.ledger.most_during_op = 0
            if op.phase is not Phase.FORWARD:
                for save, value, handle in sorted(self.saves, key=lambda held: (held[0].read_place, held[1])):
                    if save.read_before == index and isinstance(handle, DroppedUse) and handle.dropped.buffer is None:
                        assert handle.dropped.value == value
                        self._replay(handle.dropped)
                    del handle
            self._run_op(index)
            self.timeline.append(self.ledger.most_during_op)
            for storage in [s for s in self.program if s not in self.outside]:
                ends = {value.dies_after for value in values if value.storage == storage}
                if None not in ends and max(ends) <= index:
                    del self.program[storage]
            if index == last_in_model:
                for storage in self.program.values():
                    storage.dropped = None
                self._let_go_beyond(-1)
            self.saves = [held for held in self.saves if held[0].released_after > index]

    def _run_op(self, index: int) -> None:
        op, values = self.profile.ops[index], self.profile.values
        outputs = [output for output in op.outputs if output is not None]
        record: ReplayRecord | None = None
        if op.phase is Phase.FORWARD:
            for value in op.rewrites:
                self._copy_held(value)
        if any(output in self.recomputed for output in outputs):
            sources = [self._source(value) for value in op.inputs]
            rewritten = self.program[values[op.rewrites[0]].storage].dropped if op.rewrites else None
            record = self._new_recipe(index, sources)
            record.rewritten = rewritten if op.rewrites and op.rewrites[0] in op.inputs else None
        for value in outputs:
            if values[value].storage not in self.program:
                self.program[values[value].storage] = Storage(Buffer(self.ledger, values[value].num_bytes))
        self.ledger.note(op.workspace_bytes)
        for value in outputs:
            storage = self.program[values[value].storage]
            storage.dropped = None
            if value in self.recomputed:
                assert record is not None
                storage.dropped = DroppedValue(record, value)
                record.outputs.append(weakref.ref(storage.dropped))
            if value in self.offloaded:
                storage.dropped = self._send(index, value, storage)
            for save in values[value].saves:
                # The engine hooks saves inside the model only: what the loss saves is kept by autograd.
                is_hooked = save.op_index is None or self.profile.ops[save.op_index].module is not None
                handle = DroppedUse(storage.dropped) if storage.dropped and is_hooked else HeldTensor(storage)
                self.saves.append((save, value, handle))

    def _new_recipe(self, index: int, sources: list[HeldTensor | DroppedUse]) -> ReplayRecord:
        self.num_recipes += 1
        return ReplayRecord(self.num_recipes, index, sources)

    def _send(self, index: int, value: int, storage: Storage) -> DroppedValue:
        fetch = self._new_recipe(index, [])
        dropped = DroppedValue(fetch, value)
        fetch.outputs.append(weakref.ref(dropped))
        self.sent.append(weakref.ref(dropped))
        self.leaving.append((self.profile.values[value].num_bytes, storage.buffer))
        self._let_go_beyond(self.window)
        return dropped

    def _let_go_beyond(self, num_bytes: int) -> None:
        while self.leaving and sum(size for size, _ in self.leaving) > num_bytes:
            self.leaving.pop(0)

    def _fetch_ahead(self) -> None:
        alive = [dropped for reference in self.sent if (dropped := reference()) is not None]
        ahead = sum(self._size(dropped) for dropped in alive if dropped.arriving is not None)
        for dropped in reversed(alive):
            if dropped.arriving is None and dropped.buffer is None:
                ahead += self._size(dropped)
                if ahead > self.window:
                    break
                dropped.arriving = Buffer(self.ledger, self._size(dropped))
        self.ledger.note()

    def _size(self, dropped: DroppedValue) -> int:
        return self.profile.values[dropped.value].num_bytes

    def _copy_held(self, value: int) -> None:
        storage = self.program[self.profile.values[value].storage]
        held = [holder for reference in storage.held if (holder := reference()) is not None]
        if held:
            copy = Buffer(self.ledger, self.profile.values[value].num_bytes)
            for holder in held:
                holder.memory = copy
        storage.held = []

    def _source(self, value: int) -> HeldTensor | DroppedUse:
        storage = self.program[self.profile.values[value].storage]
        if storage.dropped is not None:
            assert storage.dropped.value == value
            return DroppedUse(storage.dropped)
        held = HeldTensor(storage)
        storage.held.append(weakref.ref(held))
        return held

    def _replay(self, dropped: DroppedValue) -> None:
        assert dropped.record is not None
        self._fetch_ahead()
        needed = {dropped.record.number: dropped.record}
        stack = [dropped.record]
        while stack:
            for source in stack.pop().sources:
                if isinstance(source, DroppedUse) and source.dropped.record is not None:
                    record = source.dropped.record
                    if record.number not in needed:
                        needed[record.number] = record
                        stack.append(record)
                    del record
                del source
        pending = [needed[number] for number in sorted(needed, reverse=True)]
        needed.clear()
        while pending:
            record = pending.pop()
            self._run_recipe(record)
            del record

    def _run_recipe(self, record: ReplayRecord) -> None:
        op, values = self.profile.ops[record.op_index], self.profile.values
        coming = record.outputs[0]()
        if coming is not None and coming.value in self.offloaded:
            coming.buffer = coming.arriving or Buffer(self.ledger, self._size(coming))
            coming.arriving = coming.record = None
            self.ledger.note()
            return
        self.replayed.append(record.op_index)
        buffers: dict[int, Buffer] = {}
        for output in op.outputs:
            if output is None:
                continue
            if record.rewritten is not None and output == op.outputs[0] and record.rewritten.num_uses == 1:
                assert record.rewritten.buffer is not None
                buffers[output] = record.rewritten.buffer
            else:
                buffers[output] = Buffer(self.ledger, values[output].num_bytes)
        self.ledger.note(op.workspace_bytes)
        for reference in record.outputs:
            dropped = reference()
            if dropped is not None and dropped.buffer is None:
                dropped.buffer = buffers[dropped.value]
                dropped.record = None
