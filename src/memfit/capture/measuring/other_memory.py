"""Memory on the device beside the tensors of a step: other models, and workspaces of libraries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.graph.model_profile import RecordedValue

LEFT_BEHIND = "(left by the step before)"
SKIPPED_BLOCKS = "(blocks that the measured run skipped)"


def with_other_memory(
    values: tuple[RecordedValue, ...], *, allocated_bytes: int | None, left_bytes: int, skipped_bytes: int
) -> tuple[RecordedValue, ...]:
    """Return ``values`` with what else takes memory during the whole step.

    That is what the allocator holds before it (None where that is not known), what the step before left behind, and
    what blocks would save that the measured run skipped.
    """
    if allocated_bytes is not None:
        values += (other_memory(values, allocated_bytes),)
    for name, num_bytes in ((LEFT_BEHIND, left_bytes), (SKIPPED_BLOCKS, skipped_bytes)):
        if num_bytes:
            values += (outside_value(values, name, num_bytes),)
    return values


def other_memory(values: Sequence[RecordedValue], allocated_bytes: int) -> RecordedValue:
    """Return, as a value from outside the step, what the allocator holds beyond those of ``values`` that are."""
    known_bytes = sum({value.storage: value.num_bytes for value in values if value.op_index is None}.values())
    return outside_value(values, "(other memory on the device)", max(0, allocated_bytes - known_bytes))


def outside_value(values: Sequence[RecordedValue], name: str, num_bytes: int) -> RecordedValue:
    """Return a value, with a storage of its own, that lives during the whole step."""
    num_storages = 1 + max((value.storage for value in values), default=-1)
    return RecordedValue(name, num_bytes, op_index=None, storage=num_storages)


def let_libraries_allocate(device: torch.device) -> None:
    """Run what makes matrix libraries allocate their workspaces, one for each thread that a step runs in."""
    x = torch.ones(16, 16, device=device, requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize(device)
