"""The peaks of plans as the device's allocator counts them, which is what budgets are about.

Searches go by the bytes that buffers take. A GPU's allocator counts a little more, and how much depends on the whole
order of the step, so that it is computed for the few plans that a budget chooses between. It depends on the past, too:
a plan is tried on an allocator that nothing has used before, as where a job begins with a plan from a file, and on one
that the plain step has used, as after profiling; the larger peak counts, and a margin.

An allocator can be set to split all blocks to the byte (``expandable_segments:True``). The measured peak of the plain
step shows which of the two it does.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cached_property

from memfit.planning.candidates.pool import Candidate
from memfit.planning.simulate.allocator import is_uneven, margin_bytes
from memfit.planning.simulate.simulator import judged
from memfit.planning.simulate.traffic import Allocations, Traffic
from memfit.planning.simulate.walk import Walk
from memfit.planning.step import Step

# The plain step shows that nothing is left over only where that would be so much, and the measured peak is so near to
# what its buffers take, as a share of it: to count too much is safe, to count too little is not.
_LEAST_TELLING_BYTES, _NEAR = 32 * 2**20, 1 / 8
# After so many steps the same blocks are handed out for the same buffers.
_NUM_STEPS = 2


class CountedPeaks:
    """What the allocator counts for plans of one step."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def peak_bytes(self, plan: Candidate) -> int:
        """Return the peak of a plan."""
        step = self._step
        if not step.has_met_allocator:
            return plan.peak_bytes
        if not plan.recomputed and not plan.offloading.values:
            # The plain step was measured, with whatever its allocator made of it.
            return step.profile.peak_bytes
        if not self._may_count_more:
            return plan.peak_bytes + self.margin_bytes
        traffic = Walk(step, plan.recomputed, plan.offloading).traffic()
        made_bytes = max(_most(traffic, deepcopy(past)) for past in (Allocations(), self._after_plain_steps))
        return step.resident_bytes + made_bytes + self.margin_bytes

    @cached_property
    def margin_bytes(self) -> int:
        """What is added to the peak of every plan that is not the plain step."""
        return margin_bytes(self._sizes_made) if self._step.has_met_allocator else 0

    @cached_property
    def _may_count_more(self) -> bool:
        return any(map(is_uneven, self._sizes_made)) and not _splits_to_the_byte(self._step)

    @cached_property
    def _sizes_made(self) -> list[int]:
        made = [num_bytes for num_bytes, op in zip(self._step.value_bytes, self._step.value_op, strict=True) if op >= 0]
        return [*made, *self._step.workspace_bytes.tolist()]

    @cached_property
    def _after_plain_steps(self) -> Allocations:
        allocations = Allocations()
        _most(Walk(self._step, frozenset()).traffic(), allocations)
        return allocations


def counted_plain_peak_bytes(step: Step) -> int:
    """Return what the allocator counts at the peak of the plain step, by the same rules, without a margin."""
    if not step.has_met_allocator or _splits_to_the_byte(step):
        return judged(step, frozenset()).peak_bytes
    return step.resident_bytes + _most(Walk(step, frozenset()).traffic(), Allocations())


def _splits_to_the_byte(step: Step) -> bool:
    """Return whether the plain step clearly peaked at what its buffers take, not at what the rules make of it."""
    plain = Walk(step, frozenset())
    left_over_bytes = step.resident_bytes + _most(plain.traffic(), Allocations()) - plain.peak_bytes
    is_near = abs(step.profile.peak_bytes - plain.peak_bytes) <= left_over_bytes * _NEAR
    return left_over_bytes >= _LEAST_TELLING_BYTES and is_near


def _most(traffic: Traffic, allocations: Allocations) -> int:
    return max(allocations.run(traffic) for _ in range(_NUM_STEPS))
