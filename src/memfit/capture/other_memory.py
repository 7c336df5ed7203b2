"""What takes memory beside the tensors of a step: other models, what libraries keep, what no op accounts for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.graph.model_profile import ModelProfile, RecordedValue
from memfit.planning.counted_peaks import counted_plain_peak_bytes
from memfit.planning.step import Step

UNACCOUNTED = "(memory that no op accounts for)"


def other_memory(values: Sequence[RecordedValue], allocated_bytes: int) -> RecordedValue:
    """Return, as a value from outside the step, what the allocator holds beyond those of ``values`` that are."""
    known_bytes = sum({value.storage: value.num_bytes for value in values if value.op_index is None}.values())
    return _outside(values, "(other memory on the device)", max(0, allocated_bytes - known_bytes))


def unaccounted_memory(profile: ModelProfile) -> tuple[RecordedValue, ...]:
    """Return, as a value from outside, what the step took at its peak beyond what its ops account for, if anything.

    Storages that no op returns, such as the parts of sparse tensors, are seen by the measurement alone. What a GPU's
    allocator counts too much for buffers goes with the buffers.
    """
    unaccounted_bytes = profile.peak_bytes - counted_plain_peak_bytes(Step(profile))
    return (_outside(profile.values, UNACCOUNTED, unaccounted_bytes),) if unaccounted_bytes > 0 else ()


def _outside(values: Sequence[RecordedValue], name: str, num_bytes: int) -> RecordedValue:
    num_storages = 1 + max((value.storage for value in values), default=-1)
    return RecordedValue(name, num_bytes, op_index=None, storage=num_storages)


def let_libraries_allocate(device: torch.device) -> None:
    """Run what makes matrix libraries allocate their workspaces, one for each thread that a step runs in."""
    x = torch.ones(16, 16, device=device, requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize(device)
