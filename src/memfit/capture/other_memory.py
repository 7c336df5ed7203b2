"""What takes memory beside the tensors of a step: other models, what libraries keep, what no op accounts for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from memfit.capture.timeline import plain_timeline_bytes
from memfit.graph.model_profile import RecordedOp, RecordedValue
from memfit.planning.allocator import counted_bytes

UNACCOUNTED = "(memory that no op accounts for)"


def other_memory(values: Sequence[RecordedValue], allocated_bytes: int) -> RecordedValue:
    """Return, as a value from outside the step, what the allocator holds beyond those of ``values`` that are."""
    known_bytes = sum({value.storage: value.num_bytes for value in values if value.op_index is None}.values())
    return _outside(values, "(other memory on the device)", max(0, allocated_bytes - known_bytes))


def unaccounted_memory(
    ops: Sequence[RecordedOp], values: Sequence[RecordedValue], peak_bytes: int, device: torch.device
) -> tuple[RecordedValue, ...]:
    """Return, as a value from outside, what the step took at its peak beyond what its ops account for, if anything.

    Storages that no op returns, such as the parts of sparse tensors, are seen by the measurement alone. What a GPU's
    allocator may count too much for a buffer goes with the buffer, and is left to whoever decides about that.
    """
    counted = [_as_counted(value) for value in values] if device.type == "cuda" else values
    unaccounted_bytes = peak_bytes - max(plain_timeline_bytes(ops, counted), default=0)
    return (_outside(values, UNACCOUNTED, unaccounted_bytes),) if unaccounted_bytes > 0 else ()


def _as_counted(value: RecordedValue) -> RecordedValue:
    return value if value.op_index is None else replace(value, num_bytes=counted_bytes(value.num_bytes))


def _outside(values: Sequence[RecordedValue], name: str, num_bytes: int) -> RecordedValue:
    num_storages = 1 + max((value.storage for value in values), default=-1)
    return RecordedValue(name, num_bytes, op_index=None, storage=num_storages)


def let_libraries_allocate(device: torch.device) -> None:
    """Run what makes matrix libraries allocate their workspaces, one for each thread that a step runs in."""
    x = torch.ones(16, 16, device=device, requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize(device)
