"""The tape: records one forward pass, and replaces the tensors that the plan does not save by replay records.

One tape serves one forward pass of the whole model. It is active only inside planned modules: it records the ops that
run there, and installs saved-tensor hooks there, each where the plan needs it. Records are attached to the storages of
values (`values.StorageNote`), so that a record that is not needed is freed with its storage. After the forward pass,
only the records that autograd's graph refers to are left.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from memfit.graph.outline import Address
from memfit.runtime.engine.call_arguments import (
    covers_its_storage,
    first_tensor,
    is_repeatable,
    is_strided,
    lies_under,
    written_tensors,
)
from memfit.runtime.engine.event_log import log_event
from memfit.runtime.engine.forward_pass import UnplannedCalls
from memfit.runtime.engine.interception import OpInterceptor
from memfit.runtime.engine.offloading import HostCopies
from memfit.runtime.engine.op_rules import OpRule, Treatment, is_random, rule_for
from memfit.runtime.engine.planned_modules import (
    Fate,
    FatePattern,
    PlannedModule,
    fate_of,
    has_drops,
    without_drops,
)
from memfit.runtime.engine.replay import read
from memfit.runtime.engine.replay_records import FetchRecord, InPlaceRecord, OverwriteRecord, ReplayRecord, state_of
from memfit.runtime.engine.values import (
    NOTES,
    DroppedUse,
    DroppedValue,
    Geometry,
    HeldTensor,
    Source,
    StorageNote,
    geometry_of,
    storage_as_bytes,
    tensor_with,
)
from memfit.runtime.torch_internals import (
    UnpackHook,
    detached_alias,
    outer_saved_tensors_hooks,
    refuses_saved_tensors_hooks,
)

_R = TypeVar("_R", bound=ReplayRecord)
_Draw = tuple[torch.Generator, bytes]
_NOTHING = nullcontext()


class Frame:
    """A running call of a planned module: the decisions for its values, and how often each op was called."""

    __slots__ = ("_call", "_num_calls", "_number", "planned")

    def __init__(self, planned: PlannedModule, number: int) -> None:
        self.planned = planned
        self._number = number
        self._call = planned.call_plan(number)
        self._num_calls: dict[str, int] = {}

    def address_of_next(self, op: str) -> Address:
        """Return the address of the current call of ``op``."""
        return Address(self.planned.path, self._number, op, self._num_calls.get(op, 0))

    def next_pattern(self, op: str) -> FatePattern:
        """Return the decisions for the outputs of the current call of ``op``, and count the call."""
        patterns = self._call.patterns.get(op, False)
        if not patterns:
            return Fate.SAVE
        number = self._num_calls.get(op, 0)
        self._num_calls[op] = number + 1
        if not isinstance(patterns, tuple):
            return Fate.DROP
        return patterns[number] if number < len(patterns) else Fate.SAVE

    def log_calls(self) -> None:
        """Log how often the ops with decisions were called."""
        counts = (f"{op}={number}" for op, number in sorted(self._num_calls.items()))
        log_event("calls", " ".join([self.planned.path, *counts]))

    def unplanned_calls(self) -> UnplannedCalls | None:
        """Return the first op of which something is dropped that was not called as often as planned, or None."""
        differing = (
            UnplannedCalls(self.planned.path, op, expected, self._num_calls.get(op, 0))
            for op, expected in sorted(self._call.num_calls.items())
            if self._call.patterns.get(op) and self._num_calls.get(op, 0) != expected
        )
        return next(differing, None)


class Tape(OpInterceptor):
    """Records the ops of one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.report: Callable[[UnplannedCalls | None], None] | None = None
        self._token = object()
        self._lock = threading.RLock()
        self._dropping_notes: list[weakref.ref[StorageNote]] = []
        self._frame: Frame | None = None
        self._unplanned: UnplannedCalls | None = None
        self._num_calls: Counter[PlannedModule] = Counter()
        self._num_records = 0
        self._offloading = HostCopies()
        self._is_recording = False
        self._has_hooks = False
        self._outer_hooks = outer_saved_tensors_hooks()
        self._hooks = (self._pack, self._unpack)
        self._saved_tensor_hooks = torch.autograd.graph.saved_tensors_hooks(*self._hooks)

    def run(self, planned: PlannedModule, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` as a call of ``planned``, which may be inside another: record ops, install hooks, or both.

        Where the model itself installed saved-tensor hooks, as torch.utils.checkpoint does, those take precedence, and
        nothing is recorded.
        """
        expected_hooks = self._hooks if self._has_hooks else self._outer_hooks
        if refuses_saved_tensors_hooks() or outer_saved_tensors_hooks() != expected_hooks:
            return forward(*args, **kwargs)
        before = self._frame, self._has_hooks, self._is_recording
        hooks_saves, records = planned.hooks_saves and not self._has_hooks, planned.records and not self._is_recording
        # A module that only has hooks leaves the decisions to the recorded module around it.
        if planned.records or self._frame is None:
            self._frame = Frame(planned, self._num_calls[planned])
            self._num_calls[planned] += 1
        self._has_hooks |= planned.hooks_saves
        self._is_recording |= planned.records
        try:
            with self._saved_tensor_hooks if hooks_saves else _NOTHING, self if records else _NOTHING:
                result = forward(*args, **kwargs)
            if self._frame is not before[0]:
                assert self._frame is not None
                self._frame.log_calls()
                self._unplanned = self._unplanned or self._frame.unplanned_calls()
            return result
        finally:
            self._frame, self._has_hooks, self._is_recording = before

    def close(self, *, is_complete: bool = True) -> None:
        """End the pass, and drop the records of values that outlive it, such as the model's outputs."""
        report, self.report = self.report, None
        self._offloading.end_forward()
        for reference in self._dropping_notes:
            note = reference()
            if note is not None:
                note.dropped = None
        self._dropping_notes.clear()
        # They refer to the tape in turn: without this, only the garbage collector would free it.
        del self._hooks, self._saved_tensor_hooks
        if is_complete:
            log_event("pass", "as planned" if self._unplanned is None else "not as planned")
            if report is not None:
                report(self._unplanned)

    @property
    def _module(self) -> PlannedModule:
        assert self._frame is not None
        return self._frame.planned

    # Ops of planned modules, below autograd and autocast.

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = rule_for(op)
        if rule.treatment is Treatment.VIEW:
            return op(*args, **kwargs) if kwargs else op(*args)
        kwargs = kwargs or {}
        # Tensor subclasses have storages of their own making. With gradients off, the call comes from inside an
        # autograd.Function or compiled code, where raw kernels may rewrite what the dispatcher believes it knows.
        is_plain = not types and torch.is_grad_enabled()
        pattern = self._next_pattern(rule) if is_plain else Fate.SAVE
        if pattern and not is_repeatable(rule, args):
            pattern = without_drops(pattern) if rule.treatment is Treatment.PURE else Fate.SAVE
        if rule.written:
            return self._run_writing_op(op, rule, fate_of(0, pattern), args, kwargs)
        if rule.batch_norm_arguments is not None:
            return self._run_batch_norm(op, rule, pattern, args, kwargs)
        if not pattern:
            return op(*args, **kwargs)
        return self._run_pure_op(op, rule, pattern, args, kwargs, args)

    def _next_pattern(self, rule: OpRule) -> FatePattern:
        """Return the decisions for the outputs of this call, and count the call."""
        assert self._frame is not None
        return self._frame.next_pattern(rule.name)

    def _run_pure_op(
        self, op: Any, rule: OpRule, pattern: FatePattern, args: Any, kwargs: Any, record_args: Any
    ) -> Any:
        drops = has_drops(pattern)
        draw = _generator_and_state(rule, args, kwargs) if drops and rule.draws_random else None
        result = op(*args, **kwargs)
        record = self._add_record(ReplayRecord, op, rule, record_args, kwargs, draw) if drops else None
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        for position, output in enumerate(outputs):
            fate = fate_of(position, pattern)
            if not fate or not isinstance(output, Tensor) or not is_strided(output):
                continue
            storage = output.untyped_storage()
            # An op that returns an argument made no new value. Arguments of recorded calls have notes.
            if NOTES.of(storage) is not None:
                continue
            if fate == Fate.DROP:
                assert record is not None
                log_event("drop", self._module.path, rule.name, position)
                self._drop(storage, record.add_output(position, geometry_of(output)), output._version)
            elif record is not None or not lies_under(storage, (args, kwargs)):
                self._offload(storage, output, output._version, rule)
        return result

    def _offload(self, storage: torch.UntypedStorage, output: Tensor, version: int, rule: OpRule) -> None:
        # Hooks around the model decide where saved tensors are kept.
        if self._outer_hooks is not None or type(output) is not Tensor:
            return
        alias = self.detached_alias(output)
        copy = self._offloading.send(alias, version, self._module.place, rule.name, self._module.window_bytes)
        if copy is not None:
            log_event("offload", self._module.path, rule.name)
            geometry = geometry_of(output)
            record = FetchRecord(self._new_record_number(), self._lock, self._offloading, copy, geometry)
            self._drop(storage, record.add_output(0, geometry), version)

    def _run_batch_norm(self, op: Any, rule: OpRule, pattern: FatePattern, args: Any, kwargs: Any) -> Any:
        assert rule.batch_norm_arguments is not None
        mean, variance, training = rule.batch_norm_arguments
        record_args = args
        if args[training]:
            # It updates the running statistics, which its schema does not declare. Its results do not depend on them:
            # the replay runs without them, so that they are updated once.
            self._before_write([tensor for tensor in (args[mean], args[variance]) if tensor is not None], rule)
            record_args = [None if position in (mean, variance) else arg for position, arg in enumerate(args)]
            if has_drops(pattern) and args[mean] is not None and _decides_on_type(args, mean):
                record_args[mean], record_args[variance] = map(torch.empty_like, (args[mean], args[variance]))
        if not pattern:
            return op(*args, **kwargs)
        return self._run_pure_op(op, rule, pattern, args, kwargs, record_args)

    def _run_writing_op(self, op: Any, rule: OpRule, fate: Fate, args: Any, kwargs: Any) -> Any:
        written = written_tensors(rule, args, kwargs)
        self._before_write(written, rule)
        record: ReplayRecord | None = None
        geometry: Geometry | None = None
        # Autograd increments the version after this call returns.
        version = written[0]._version + 1 if fate and written and is_strided(written[0]) else None
        if fate == Fate.DROP and version is not None:
            target = written[0]
            draw = _generator_and_state(rule, args, kwargs)
            if rule.treatment is Treatment.OVERWRITE and covers_its_storage(target):
                geometry = geometry_of(target)
                overwrite = self._add_record(OverwriteRecord, op, rule, (None, *args[1:]), kwargs, draw)
                overwrite.geometry, overwrite.device = geometry, target.device
                record = overwrite
            elif rule.treatment is Treatment.IN_PLACE:
                content = self._note(target.untyped_storage()).content(target)
                # For content that is held anyway, a record would save nothing: a copy would have to be held.
                if content is not None:
                    geometry = content.geometry
                    record = self._add_record(InPlaceRecord, op, rule, args, kwargs, draw)
        result = op(*args, **kwargs)
        if self.is_dispatch_mode and rule.name.startswith("aten._foreach_"):
            # Inside a dispatch mode torch does not count these writes, and views of the tensors would not notice them.
            torch.autograd.graph.increment_version(written)
        for tensor in written:
            stale_note = _note_of(tensor)
            if stale_note is not None:
                stale_note.dropped = None
        if version is not None and record is not None and geometry is not None:
            log_event("drop", self._module.path, rule.name, 0)
            self._drop(written[0].untyped_storage(), record.add_output(0, geometry), version)
        elif version is not None and fate == Fate.OFFLOAD:
            self._offload(written[0].untyped_storage(), written[0], version, rule)
        return result

    def _before_write(self, written: list[Tensor], rule: OpRule) -> None:
        """Copy what records hold of the storages that are about to be written; wait for their copies to the host."""
        # Ops of libraries may increment versions before they are intercepted.
        num_counted = 0 if rule.name.startswith("aten.") else 1
        for tensor in written:
            note = _note_of(tensor)
            if note is None:
                continue
            record = note.dropped.record if note.dropped is not None else None
            if isinstance(record, FetchRecord):
                record.copy.before_write(num_counted)
            # A tensor over content that was written without being recorded must not get a copy of that content.
            holders = [
                holder
                for reference in note.held
                if (holder := reference()) is not None and holder.num_writes() <= num_counted
            ]
            note.held = []
            if holders:
                copy = storage_as_bytes(tensor).clone()
                for holder in holders:
                    holder.replace(tensor_with(geometry_of(holder.tensor), copy))

    def _add_record(self, kind: type[_R], op: Any, rule: OpRule, args: Any, kwargs: Any, draw: _Draw | None) -> _R:
        log_event("record", self._module.path, rule.name)
        record = kind(
            self._new_record_number(),
            self._lock,
            self._offloading,
            op,
            [self._with_sources(arg, rule) for arg in args],
            {name: self._with_sources(arg, rule) for name, arg in kwargs.items()} if kwargs else kwargs,
        )
        if draw is not None:
            record.draws_from(*draw)
        return record

    def _new_record_number(self) -> int:
        self._num_records += 1
        return self._num_records

    def _with_sources(self, argument: Any, rule: OpRule) -> Any:
        """Return ``argument`` with sources in place of the tensors in it."""
        if isinstance(argument, Tensor):
            return self._source(argument, rule)
        if type(argument) is list or type(argument) is tuple:
            return [self._with_sources(item, rule) for item in argument]
        return argument

    def _source(self, tensor: Tensor, rule: OpRule) -> Source:
        if not is_strided(tensor):
            return HeldTensor(tensor, self._module.place, rule.name)
        note = self._note(tensor.untyped_storage())
        if note.dropped is not None:
            dropped = note.content(tensor)
            if dropped is not None:
                return DroppedUse(dropped, geometry_of(tensor))
        if tensor.is_inference():
            # Writes to it are not counted.
            return HeldTensor(tensor.clone(), self._module.place, rule.name)
        # The tensor itself where possible: sharding replaces the memory of parameters between passes.
        alias = tensor if _has_no_history(tensor) else self.detached_alias(tensor)
        held = HeldTensor(alias, self._module.place, rule.name)
        note.held.append(weakref.ref(held))
        return held

    def _note(self, storage: torch.UntypedStorage) -> StorageNote:
        """Return this tape's note on ``storage``, writing one if there is none."""
        note = NOTES.of(storage)
        if note is None or note.tape_token is not self._token:
            earlier = note
            note = StorageNote(self._token)
            if earlier is not None:
                # An earlier forward pass whose backward is still to come may hold tensors over this storage.
                note.held = [reference for reference in earlier.held if reference() is not None]
            NOTES.set(storage, note)
        return note

    def _drop(self, storage: torch.UntypedStorage, value: DroppedValue, version: int) -> None:
        """Note that the content of ``storage`` at ``version`` is dropped."""
        note = self._note(storage)
        note.dropped = value
        note.version = version
        self._dropping_notes.append(weakref.ref(note))

    # Saved-tensor hooks.

    def _pack(self, tensor: Tensor) -> Any:
        is_plain = type(tensor) is Tensor or type(tensor) is nn.Parameter
        if is_plain and is_strided(tensor):
            note = NOTES.of(tensor.untyped_storage())
            if note is not None and note.dropped is not None and note.tape_token is self._token:
                dropped = note.content(tensor)
                if dropped is not None:
                    return DroppedUse(dropped, geometry_of(tensor))
        if self._outer_hooks is not None:
            pack, unpack = self._outer_hooks
            return _PackedOutside(pack(tensor), unpack)
        if not is_plain:
            return tensor if tensor.is_leaf else tensor.detach()
        # An op's output refers to its autograd node, and the node will refer to what is returned here: a cycle.
        return HeldTensor(tensor if _has_no_history(tensor) else detached_alias(tensor), self._module.place, None)

    def _unpack(self, packed: Any) -> Tensor:
        kind = type(packed)
        if kind is DroppedUse or kind is HeldTensor:
            return read(packed)
        if kind is _PackedOutside:
            packed = packed.restored()
        assert isinstance(packed, Tensor)
        return packed


class _PackedOutside(NamedTuple):
    """A tensor that the plan keeps, handed to the saved-tensor hooks around the tape."""

    payload: Any
    unpack: UnpackHook

    def restored(self) -> Tensor:
        return self.unpack(self.payload)


def _note_of(tensor: Tensor) -> StorageNote | None:
    return NOTES.of(tensor.untyped_storage()) if is_strided(tensor) else None


def _has_no_history(tensor: Tensor) -> bool:
    """Return whether holding ``tensor`` itself holds no more than its memory: a leaf, or a view of one."""
    if tensor.is_leaf:
        return True
    base = tensor._base
    return base is not None and base.is_leaf


def _decides_on_type(args: Any, statistic: int) -> bool:
    """Return whether the dtype of a batch norm's result depends on that of its running statistics."""
    tensor, weight = args[:2]
    return weight is None and tensor.dtype != args[statistic].dtype


def _generator_and_state(rule: OpRule, args: Any, kwargs: Any) -> _Draw | None:
    """Return the generator that this call draws from and its state before the call, or None where it draws none."""
    if not is_random(rule, args):
        return None
    generator = kwargs.get("generator")
    if generator is None:
        device = first_tensor(args).device
        generator = torch.default_generator if device.type == "cpu" else _device_generator(device)
    return generator, state_of(generator)


def _device_generator(device: torch.device) -> torch.Generator:
    generator = torch.get_device_module(device).default_generators[device.index]
    assert isinstance(generator, torch.Generator)
    return generator
