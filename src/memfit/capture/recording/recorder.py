"""Writes down a training step op by op: what each read and made, when storages die, what autograd saves and reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memfit.capture.phases import PhaseTracker
from memfit.capture.recording.flop_counts import flops_of
from memfit.capture.recording.lifetimes import SavedStorages, SaveHandle, StorageMark
from memfit.capture.recording.module_scopes import ModuleScopes
from memfit.capture.recording.op_facts import NOTHING_KNOWN, facts_of, fused_facts_of
from memfit.capture.recording.plain_tensors import is_plain, only_plain, plain_alias
from memfit.capture.recording.step_recording import Recording, SeenSave
from memfit.distributed.local_tensors import has_dtensor
from memfit.graph.model_profile import Phase, RecordedOp, RecordedValue, Replay
from memfit.graph.names import NO_GRADIENTS, ValueName
from memfit.runtime.engine.call_arguments import (
    covers_its_storage,
    is_repeatable,
    is_strided,
    tensors_in,
    written_tensors,
)
from memfit.runtime.engine.interception import OpInterceptor
from memfit.runtime.engine.native_tape import fuses_on
from memfit.runtime.engine.op_rules import OpRule, Treatment, rule_for
from memfit.runtime.engine.storage_attribute import StorageAttribute
from memfit.runtime.engine.storage_size import storage_bytes_on

UNSEEN_OP = "memfit.unseen"
"""The op that stands for making a storage which no op returned: a Python number made a tensor, compiled code."""

_MARKS: StorageAttribute[StorageMark] = StorageAttribute("mark")


class _Buffer:
    """A tensor over memory that is allocated and freed in place: its size when it was last seen, and the storage."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.num_bytes = 0
        self.content: int | None = None


class StepRecorder(OpInterceptor):
    """A dispatch mode that fills ``recording`` with what runs inside `recording_ops`, until `close`.

    ``outside`` names what exists before the step, as far as that is known; ``is_outside`` decides it for a tensor that
    is met for the first time. The storages of ``buffers`` are allocated and freed in place.
    """

    def __init__(
        self,
        scopes: ModuleScopes,
        device: torch.device,
        outside: Iterable[tuple[str, Tensor]],
        is_outside: Callable[[Tensor], bool],
        *,
        buffers: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self.recording = Recording()
        self._scopes = scopes
        self._device = device
        self._is_outside = is_outside
        self._fuses = fuses_on(device)
        self._phases = PhaseTracker()
        self._saved_storages = SavedStorages()
        self._num_begun = 0
        self._num_calls: Counter[tuple[str, str]] = Counter()
        self._storage_of_save: list[int | None] = []
        self._is_open = True
        scopes.position = lambda: len(self.recording.ops)
        scopes.is_forward = lambda: self._phase is Phase.FORWARD
        self._buffer_storages: set[int] = set()
        for name, tensor in outside:
            if is_strided(tensor) and self._mark_on(tensor) is None:
                self._number_outside(name, tensor)
        self._buffers = [_Buffer(buffer) for buffer in buffers]
        for number, buffer in enumerate(buffers):
            # What ops read there is always to be had. The memory is that of other values, made when it is allocated.
            mark = StorageMark(self, self._new_storage())
            _MARKS.set(buffer.untyped_storage(), mark)
            self._number_value(mark, f"gathered parameter#{number}", 0, None)
            self._buffer_storages.add(mark.storage)
            if num_bytes := storage_bytes_on(device, buffer):
                # Left over from an earlier pass.
                content = self._new_storage()
                self.recording.values.append(RecordedValue(f"gathered before#{number}", num_bytes, None, content))
                self._buffers[number].num_bytes, self._buffers[number].content = num_bytes, content
            self.recording.outside.append(buffer)

    @contextmanager
    def recording_ops(self) -> Iterator[None]:
        """Record what runs inside the block."""
        with self._phases.tracked(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack), self:
            yield

    def enter_phase(self, phase: Phase) -> None:
        """Take what runs from now on, outside of autograd's engine and optimizers, for part of ``phase``."""
        self._phases.outer = phase

    def close(self) -> Recording:
        """End the recording: what is alive now outlives the step. Take all marks off what came from outside."""
        self._note_program_deaths()
        self._is_open = False
        self.recording.module_calls = self._scopes.calls
        self._saved_storages.clear()
        for tensor in self.recording.outside:
            _MARKS.remove(tensor.untyped_storage())
        # The recorder is part of reference cycles. Tensors in them would stay until garbage is collected.
        recording, self.recording = self.recording, Recording()
        self._buffers.clear()
        return recording

    def storage_died(self, number: int) -> None:
        """Note that a storage is gone."""
        if self._is_open:
            self.recording.died_after[number] = self._num_begun - 1

    def save_released(self, number: int) -> None:
        """Note that autograd let go of a save."""
        if self._is_open:
            self.recording.saves[number].released_after = self._num_begun - 1
            self._saved_storages.release(self._storage_of_save[number])

    def _note_program_deaths(self) -> None:
        """Note which of the saved storages only autograd holds now: the program itself needs them no more."""
        for number in self._saved_storages.take_those_held_by_saves_alone():
            self.recording.left_after[number] = self._num_begun - 1

    # What runs.

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = rule_for(op)
        if self._phase is not Phase.FORWARD and has_dtensor(types):
            # The optimizer of FSDP2: what runs on local tensors is recorded. In the forward pass the engine takes
            # ops on DTensors as they are, and so does the recording.
            return NotImplemented
        self.recording.has_dtensors |= has_dtensor(types)
        # Questions about a fake tensor reach a mode as ops (prim.device), and so do marks for the profiler.
        if not only_plain(types) or rule.name.startswith(("prim.", "profiler.")):
            return op(*args, **kwargs)
        if rule.treatment is Treatment.VIEW:
            return self._run_view(op, args, kwargs)
        self._note_resized_buffers()
        read = [self._value_of(tensor) for tensor in tensors_in((args, kwargs))]
        written = written_tensors(rule, args, kwargs)
        rewrites = tuple(index for tensor in written if (index := self._value_of(tensor)) is not None)
        hidden_writes = tuple(self._value_of(tensor) for tensor in _statistics_written(rule, args))
        replay = _replay_of(rule, args, written)
        overwritten = set(rewrites) if rule.treatment is Treatment.OVERWRITE else set()
        inputs = tuple(dict.fromkeys(index for index in read if index is not None and index not in overwritten))
        self._note_program_deaths()
        self._num_begun += 1
        try:
            result = op(*args, **kwargs)
        except BaseException:
            self._num_begun -= 1
            raise
        results = _new_contents(result, written)
        flops = flops_of(op, args, kwargs, result)
        phase = self._phase
        name = self._next_name(rule.name, phase)
        recording = self.recording
        fused = fused_facts_of(op, rule, args, kwargs, results, read) if self._fuses else None
        recording.facts.append(facts_of(op, rule, args, kwargs, results, flops, fused))
        recording.ops.append(
            RecordedOp(
                module=self._module_in(phase),
                op=rule.name,
                call=name.call,
                inputs=inputs,
                outputs=tuple(
                    self._new_value(tensor, name._replace(output=position), position < len(written))
                    for position, tensor in enumerate(results)
                ),
                rewrites=rewrites,
                flops=flops,
                replay=replay,
                phase=phase,
                hidden_writes=tuple(index for index in hidden_writes if index is not None),
                has_gradients=torch.is_grad_enabled(),
            )
        )
        return result

    def _run_view(self, op: Any, args: Any, kwargs: Any) -> Any:
        mark = None
        for base in tensors_in(args[:1]):
            self._value_of(base)
            mark = self._mark_on(base) if is_strided(base) else None
        result = op(*args, **kwargs)
        for view in tensors_in([result]):
            # The fake view of a real tensor has a storage apart, and stands for the same.
            if is_strided(view) and mark is not None and self._mark_on(view) is None:
                _MARKS.set(view.untyped_storage(), mark)
        return result

    @property
    def _phase(self) -> Phase:
        # A module that differentiates inside its forward pass is in its forward pass all the time.
        return Phase.FORWARD if self._scopes.is_in_forward else self._phases.phase

    def _module_in(self, phase: Phase) -> str | None:
        # A checkpoint inside the model runs modules once more in the backward pass: that is backward's work.
        return self._scopes.current if phase is Phase.FORWARD else None

    def _next_name(self, op: str, phase: Phase) -> ValueName:
        module = self._module_in(phase)
        if module is None:
            # Parentheses keep these apart from any module's path.
            module = "(loss)" if phase is Phase.FORWARD else f"({phase})"
        if not torch.is_grad_enabled() and phase is Phase.FORWARD:
            # The engine counts calls with gradients only.
            op = f"{op}{NO_GRADIENTS}"
        call = self._num_calls[module, op]
        self._num_calls[module, op] += 1
        return ValueName(module, op, call)

    # Which value a tensor is.

    def _new_value(self, result: Any, name: ValueName, is_rewritten: bool) -> int | None:
        """Number the new content of a result's storage; None where the op made no new content."""
        if not isinstance(result, Tensor) or not is_strided(result):
            return None
        mark = self._mark_on(result)
        if mark is not None and (not is_rewritten or mark.storage in self._buffer_storages):
            return None
        op_index = len(self.recording.ops)
        num_bytes = storage_bytes_on(self._device, result)
        if mark is None:
            return self._number_storage(str(name), result, op_index)
        if self.recording.values[mark.value].num_bytes != num_bytes:
            # Resized: what was there is given back, and this is a storage of its own.
            self.storage_died(mark.storage)
            mark.storage = self._new_storage()
        return self._number_value(mark, str(name), num_bytes, op_index)

    def _value_of(self, tensor: Tensor) -> int | None:
        """Return the number of what the tensor's storage holds, numbering it now if it is new here."""
        if not is_strided(tensor):
            return None
        mark = self._mark_on(tensor)
        if mark is not None:
            return mark.value
        if self._is_outside(tensor):
            return self._number_outside(f"outside#{self.recording.num_storages}", tensor)
        return self._number_unseen(tensor)

    def _number_outside(self, name: str, tensor: Tensor) -> int:
        index = self._number_storage(name, tensor, None)
        self.recording.outside.append(tensor)
        return index

    def _note_resized_buffers(self) -> None:
        for buffer in self._buffers:
            num_bytes = storage_bytes_on(self._device, buffer.tensor)
            if num_bytes == buffer.num_bytes:
                continue
            if buffer.content is not None:
                self.storage_died(buffer.content)
            buffer.num_bytes, buffer.content = num_bytes, None
            if num_bytes:
                name = self._begin_unseen_op()
                buffer.content = self._new_storage()
                self.recording.values.append(
                    RecordedValue(str(name), num_bytes, len(self.recording.ops), buffer.content)
                )
                self._end_unseen_op(name, len(self.recording.values) - 1)

    def _number_unseen(self, tensor: Tensor) -> int:
        name = self._begin_unseen_op()
        index = self._number_storage(str(name), tensor, len(self.recording.ops))
        self._end_unseen_op(name, index)
        return index

    def _begin_unseen_op(self) -> ValueName:
        self._num_begun += 1
        return self._next_name(UNSEEN_OP, self._phase)

    def _end_unseen_op(self, name: ValueName, value: int) -> None:
        phase = self._phase
        recording = self.recording
        recording.facts.append(NOTHING_KNOWN)
        recording.ops.append(
            RecordedOp(
                module=self._module_in(phase),
                op=UNSEEN_OP,
                call=name.call,
                inputs=(),
                outputs=(value,),
                rewrites=(),
                flops=0,
                replay=Replay.STATEFUL,
                phase=phase,
                has_gradients=False,
            )
        )

    def _number_storage(self, name: str, tensor: Tensor, op_index: int | None) -> int:
        mark = StorageMark(self, self._new_storage())
        _MARKS.set(tensor.untyped_storage(), mark)
        return self._number_value(mark, name, storage_bytes_on(self._device, tensor), op_index)

    def _number_value(self, mark: StorageMark, name: str, num_bytes: int, op_index: int | None) -> int:
        mark.value = len(self.recording.values)
        self.recording.values.append(RecordedValue(name, num_bytes, op_index, mark.storage))
        return mark.value

    def _new_storage(self) -> int:
        self.recording.num_storages += 1
        return self.recording.num_storages - 1

    def _mark_on(self, tensor: Tensor) -> StorageMark | None:
        mark = _MARKS.of(tensor.untyped_storage())
        return mark if mark is not None and mark.watcher is self else None

    # What autograd saves.

    def _pack(self, tensor: Tensor) -> Any:
        if self._phase is Phase.FORWARD and has_dtensor([type(tensor)]):
            # With the engine in C++, only the ops on the local tensors are seen.
            self.recording.has_dtensors = True
        # What a backward pass saves (of a double backward, of a checkpoint's second forward) is no forward value's.
        if not is_plain(tensor) or not is_strided(tensor) or self._phase is not Phase.FORWARD:
            if self._phase is Phase.FORWARD:
                self.recording.opaque_saves.add(_kind_of(tensor))
            return tensor if tensor.is_leaf else tensor.detach()
        index = self._value_of(tensor)
        assert index is not None
        number = len(self.recording.saves)
        self.recording.saves.append(SeenSave(index, self._num_begun, self._module_in(Phase.FORWARD)))
        value = self.recording.values[index]
        if value.op_index is None:
            # Whoever shards parameters gives them other memory in between, which an alias would not follow.
            self._storage_of_save.append(None)
            return SaveHandle(self, number, tensor if tensor.is_leaf else plain_alias(tensor))
        kept = plain_alias(tensor)
        self._storage_of_save.append(value.storage)
        if value.storage not in self.recording.left_after:
            self._saved_storages.add(value.storage, kept.untyped_storage())
        return SaveHandle(self, number, kept)

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, SaveHandle):
            assert isinstance(packed, Tensor)
            return packed
        if self._is_open:
            save = self.recording.saves[packed.number]
            if save.read_before is None:
                save.read_before = self._num_begun
                self._scopes.backward_runs()
                self.recording.reads.append(packed.number)
        return packed.tensor


def _new_contents(result: Any, written: list[Tensor]) -> Sequence[Any]:
    """Return what the call wrote, and what it returned beside that: most ops do one or the other, few both."""
    returned = result if isinstance(result, (tuple, list)) else (result,)
    if not written:
        return returned
    rewritten = {id(tensor.untyped_storage()) for tensor in written if is_strided(tensor)}
    beside = [
        tensor
        for tensor in tensors_in(list(returned))
        if is_strided(tensor) and id(tensor.untyped_storage()) not in rewritten
    ]
    return [*written, *beside]


def _statistics_written(rule: OpRule, args: Any) -> list[Tensor]:
    """Return the running statistics that a batch norm updates, which neither schemas nor versions show."""
    if rule.batch_norm_arguments is None:
        return []
    mean, variance, training = rule.batch_norm_arguments
    return tensors_in([args[mean], args[variance]]) if args[training] else []


def _replay_of(rule: OpRule, args: Any, written: list[Tensor]) -> Replay:
    if rule.treatment is Treatment.OPAQUE:
        return Replay.STATEFUL
    if rule.treatment is Treatment.OVERWRITE and not covers_its_storage(written[0]):
        return Replay.STATEFUL
    if not torch.is_grad_enabled():
        return Replay.NO_GRAD
    return Replay.YES if is_repeatable(rule, args) else Replay.UNORDERED


def _kind_of(tensor: Tensor) -> str:
    """Return what a tensor without a plain storage is called."""
    if tensor.is_nested:
        return "NestedTensor"
    return type(tensor).__name__ if not is_plain(tensor) else str(tensor.layout).removeprefix("torch.")
