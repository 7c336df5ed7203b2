"""What ops take when they are replayed in one kernel with their neighbours: the bytes that the kernel moves for them.

A plan decides op by op, so each has a share of its own. What only such ops read, and autograd does not save, is neither
written nor read again: only the kernel itself uses it. All else is counted, also what one of these ops makes
and the next one reads in the same kernel, as the plan may well keep it. So kernels take a little less than is
predicted here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from memfit.capture.recording.step_recording import OpFacts
from memfit.graph.model_profile import Phase, RecordedOp, RecordedValue


def with_fused_replays(
    ops: Sequence[RecordedOp], facts: Sequence[OpFacts], values: Sequence[RecordedValue], bytes_per_second: float
) -> tuple[RecordedOp, ...]:
    """Return ``ops`` with what replaying them takes on a device that moves so many bytes a second."""
    forward = [index for index, op in enumerate(ops) if op.phase is Phase.FORWARD]
    fused = {index: found for index in forward if (found := facts[index].fused) is not None}
    readers: defaultdict[int, set[int]] = defaultdict(set)
    for index in forward:
        for value in ops[index].inputs:
            readers[value].add(index)
    passed_on = {
        value
        for value, read_by in readers.items()
        if values[value].op_index in fused and not values[value].is_saved and read_by <= fused.keys()
    }
    with_replays = list(ops)
    for index, fact in fused.items():
        op = ops[index]
        made_by_others = any(value is not None and values[value].op_index in fused for value, _ in fact.reads)
        read_by_others = any(value is not None and readers[value] & fused.keys() for value in op.outputs)
        if not (fact.gains_alone or made_by_others or read_by_others):
            continue
        num_bytes = sum(num_bytes for value, num_bytes in fact.reads if value not in passed_on)
        if not passed_on.issuperset(op.outputs):
            num_bytes += fact.made_bytes
        with_replays[index] = replace(op, replay_seconds=min(num_bytes / bytes_per_second, op.seconds))
    return tuple(with_replays)
