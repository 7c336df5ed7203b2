"""Restores dropped values by running their records when the values are read."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor

from memfit.distributed.wrapped_models import fsdp_modules
from memfit.errors import StaleValueError
from memfit.runtime.engine.call_arguments import is_strided
from memfit.runtime.engine.planned_modules import Place
from memfit.runtime.engine.replay_records import ReplayRecord
from memfit.runtime.engine.values import DroppedUse, DroppedValue, HeldTensor, Source, tensor_with
from memfit.runtime.torch_internals import gather_buffers


def read(source: Source) -> Tensor:
    """Return the tensor behind ``source``, replaying the records that it needs."""
    if type(source) is HeldTensor:
        tensor = source.tensor
        if is_freed(tensor):
            gather(source.place, tensor)
        if source.num_writes():
            raise stale_value_error(source.place, source.op_name, tensor, source.version)
        return tensor
    assert type(source) is DroppedUse
    value = source.value
    record = value.record
    if record is not None:
        # Two threads may run backward through one graph at once.
        with record.lock:
            if value.tensor is None:
                _replay(value)
    assert value.tensor is not None
    return tensor_with(source.geometry, value.tensor)


def is_freed(tensor: Tensor) -> bool:
    """Return whether the tensor's memory was freed: FSDP2 frees gathered parameters between their uses."""
    return is_strided(tensor) and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def gather(place: Place, tensor: Tensor) -> None:
    """Let FSDP2 gather the parameter ``tensor``, as it does in the backward pass of the module that has it.

    A replay that begins in another module may need it earlier. All processes replay the same.
    """
    storage = tensor.untyped_storage()
    for module in fsdp_modules(place.model):
        if any(buffer.untyped_storage() is storage for buffer in gather_buffers(module)):
            module.unshard()
            return
    raise StaleValueError(
        f"a tensor of shape {tuple(tensor.shape)} that the forward pass read in {place.path or 'the model'} was freed "
        "before the backward pass, and no module sharded by fully_shard gathers it again"
    )


def _replay(value: DroppedValue) -> None:
    """Fill ``value`` by running each record that it needs once, in the order of recording."""
    # A record holds a call as it was below autograd and autocast. Neither may act on it a second time.
    with torch.no_grad(), ExitStack() as stack:
        for device_type in _autocast_device_types():
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        assert value.record is not None
        value.record.offloading.fetch_ahead()
        pending = _records_for(value.record)
        while pending:
            # Popped before it runs: the list must not keep alive what the record frees.
            record = pending.pop()
            args = [_with_tensors(argument) for argument in record.args]
            kwargs = {name: _with_tensors(argument) for name, argument in record.kwargs.items()}
            record.run(args, kwargs)
            del record, args, kwargs


def _records_for(last: ReplayRecord) -> list[ReplayRecord]:
    """Return the records that have to run for the ``last`` one's sake, that one first."""
    needed = {last.number: last}
    stack = [last]
    while stack:
        for source in stack.pop().dropped_sources():
            record = source.record
            if record is not None and record.number not in needed:
                needed[record.number] = record
                stack.append(record)
    return [needed[number] for number in sorted(needed, reverse=True)]


def _with_tensors(argument: Any) -> Any:
    """Return ``argument`` with tensors in place of the sources in it."""
    kind = type(argument)
    if kind is DroppedUse or kind is HeldTensor:
        return read(argument)
    if kind is list:
        return [_with_tensors(item) for item in argument]
    return argument


@cache
def _autocast_device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def stale_value_error(place: Place, op_name: str | None, tensor: Tensor, version: int) -> StaleValueError:
    """Return the error that ``tensor``, which had ``version`` when it was last read, was changed since."""
    what = place.owned_name(tensor) or (
        f"a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype} from outside the planned modules"
    )
    reader = f"{place.path}::{op_name}" if op_name else f"autograd in {place.path or 'the model'}"
    return StaleValueError(
        f"{what} was changed between the forward and the backward pass "
        f"(version {tensor._version}, was {version}), but {reader} still needs what it held. "
        "Run backward before changing it, or change a clone of it."
    )
