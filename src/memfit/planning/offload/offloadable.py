"""Which values of a step can be offloaded, which of them a plan holds, and what they take of the host's memory."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.graph.model_profile import Phase
from memfit.planning.simulate.walk import Walk
from memfit.planning.step import NEVER, Step

# Smaller ones take the host more time than they are worth.
SMALLEST_OFFLOADED_BYTES = 2**16


def most_offloaded_bytes(step: Step, added_seconds: float, host_budget_bytes: int) -> int:
    """Return what a plan can offload at most if it adds no more than ``added_seconds`` to the step.

    All offloaded values are copied over the link one after the other, within the step. A plan that held it instead
    would take at most so much more memory at any time, and recompute the same: so a plan within a budget that offloads
    is no faster than the fastest without offloading within a budget that is larger by this.
    """
    link = step.profile.link
    assert link is not None
    step_seconds = max(step.profile.step_seconds, step.time.plain_seconds)
    # A device that waits for copies gains by that, but never more than it would by resting all the time.
    copying_seconds = (step_seconds + added_seconds) / step.profile.unthrottled_share
    carried = int(link.out_bytes_per_second * copying_seconds)
    return min(carried, host_budget_bytes, sum(step.value_bytes[value] for value in may_be_offloaded(step)))


def may_be_offloaded(step: Step) -> list[int]:
    """Return the values that can be sent away at all, in the order in which they are made.

    They are what their storage holds in the end, and from before the backward pass's first read on, only that pass uses
    them. They replay bit-exactly: elsewhere, a kernel that the engine does not see may write to them during the copy.
    """
    ops, values = step.profile.ops, step.profile.values
    first_read = step.last_time_before_reads
    last_contents = [
        [value for value in contents if step.overwritten_at[value] == NEVER] for contents in step.values_of_storage
    ]
    return [
        value
        for value in step.plannable
        if values[value].num_bytes >= SMALLEST_OFFLOADED_BYTES
        and value in step.may_be_recomputed
        and ops[step.value_op[value]].phase is Phase.FORWARD
        and last_contents[step.value_storage[value]] == [value]
        and step.natural_end_of_storage[step.value_storage[value]] <= first_read
    ]


def held_by(step: Step, recomputed: frozenset[int], eligible: Iterable[int]) -> list[int]:
    """Return those of the ``eligible`` values that a plan holds for the backward pass, and whose bytes it reads."""
    dropping_ops = {step.value_op[value] for value in recomputed}
    sources = {value for op in Walk(step, recomputed).replayed_ops for value in step.op_inputs[op]}
    return [
        value
        for value in eligible
        if step.value_op[value] not in dropping_ops and (step.read_rank_of_value[value] < NEVER or value in sources)
    ]


def host_bytes_of(step: Step, values: Iterable[int]) -> int:
    """Return what these values take of the host's memory: torch rounds pinned blocks up to powers of two."""
    return sum(1 << (step.profile.values[value].num_bytes - 1).bit_length() for value in values)
