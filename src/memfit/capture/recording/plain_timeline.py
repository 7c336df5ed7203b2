"""The memory of the plain step, op by op, from what was recorded of it alone."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.graph.model_profile import RecordedOp, RecordedValue


def plain_timeline_bytes(ops: Sequence[RecordedOp], values: Sequence[RecordedValue]) -> list[int]:
    """Return how many bytes live while each op runs, if every value that autograd saved is held.

    A storage lives from the op that made its first value, or from the start, until both the program and autograd are
    done with it.
    """
    born_at: dict[int, int] = {}
    died_after: dict[int, int] = {}
    num_bytes: dict[int, int] = {}
    last = len(ops) - 1
    for value in values:
        born_at.setdefault(value.storage, 0 if value.op_index is None else value.op_index)
        num_bytes.setdefault(value.storage, value.num_bytes)
        needed_until = [save.released_after for save in value.saves]
        needed_until.append(last if value.dies_after is None else value.dies_after)
        died_after[value.storage] = max(died_after.get(value.storage, 0), *needed_until)
    changes = [0] * (len(ops) + 1)
    for storage, size in num_bytes.items():
        changes[born_at[storage]] += size
        changes[max(died_after[storage], born_at[storage]) + 1] -= size
    timeline: list[int] = []
    live = 0
    for op, change in zip(ops, changes, strict=False):
        live += change
        timeline.append(live + op.workspace_bytes)
    return timeline
