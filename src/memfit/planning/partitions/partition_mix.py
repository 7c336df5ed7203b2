"""Which partition each compiled block uses: a dynamic program over the blocks in the order in which they run.

The state before a block is what the blocks before it hold until their backward passes. It decides what is left for the
block's own passes and for what runs outside blocks, so that each constraint is local::

    base of the block's forward pass  + held before          + forward bytes of the partition  ≤ budget
    base of its backward pass         + held with its own    + backward bytes of the partition ≤ budget
    base of a segment outside blocks  + held by the blocks that hold something there           ≤ budget

States that hold more and take longer than another are dropped. The result is the fastest mixture of the menu.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.graph.compiled_data.compiled_blocks import (
    CompiledProfile,
    MeasuredPartition,
    SegmentKind,
)

# Blocks of one kind hold equal bytes, so that few sums are different; past so many states, close ones are merged.
_MOST_STATES = 20_000

Choice = tuple[int, ...]
"""For each block, the place of its partition in the menu of its kind."""


@dataclass(frozen=True, slots=True)
class _Bases:
    """The largest base of each block's passes, and of what runs outside blocks while the first n blocks hold."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    outside: tuple[int, ...]


class PartitionMix:
    """Chooses partitions for the blocks of a measured step."""

    def __init__(self, profile: CompiledProfile) -> None:
        self.profile = profile
        self._blocks = profile.blocks
        self._bases = _bases_of(profile)

    def fastest_within(self, budget_bytes: int) -> Choice | None:
        """Return the fastest choice whose peak is at most ``budget_bytes``, or None where there is none."""
        if self._bases.outside[0] > budget_bytes:
            return None
        held = np.zeros(1, dtype=np.int64)
        seconds = np.zeros(1)
        steps: list[tuple[np.ndarray, np.ndarray]] = []
        for place, block in enumerate(self._blocks):
            # What may be held before the block with each entry of its menu.
            most_held = [budget_bytes - self._peak_at(place, each, 0) for each in block.measured]
            menu, states = np.nonzero(held <= np.array(most_held)[:, None])
            if not len(states):
                return None
            held_by = np.array([each.held_bytes for each in block.measured], dtype=np.int64)
            seconds_of = np.array([each.seconds for each in block.measured])
            held, seconds = held[states] + held_by[menu], seconds[states] + seconds_of[menu]
            kept = _undominated(held, seconds)
            held, seconds = held[kept], seconds[kept]
            steps.append((states[kept], menu[kept]))
        state = int(np.argmin(seconds))
        choice: list[int] = []
        for states, menu in reversed(steps):
            choice.append(int(menu[state]))
            state = int(states[state])
        return tuple(reversed(choice))

    def peak_bytes(self, choice: Choice) -> int:
        """Return the predicted peak of the step."""
        held, peak = 0, self._bases.outside[0]
        for place, (block, number) in enumerate(zip(self._blocks, choice, strict=True)):
            peak = max(peak, self._peak_at(place, block.measured[number], held))
            held += block.measured[number].held_bytes
        return peak

    def seconds(self, choice: Choice) -> float:
        """Return the predicted seconds of the step."""
        passes = sum(block.measured[number].seconds for block, number in zip(self._blocks, choice, strict=True))
        return self.profile.outside_seconds + passes

    def least_peak_bytes(self) -> int:
        """Return the smallest peak of any choice."""
        low, high = 0, self.peak_bytes((0,) * len(self._blocks))
        while low < high:
            middle = (low + high) // 2
            if self._fits(middle):
                high = middle
            else:
                low = middle + 1
        return high

    def _fits(self, budget_bytes: int) -> bool:
        """Whether any choice fits: holding less before a block is never worse after it."""
        if self._bases.outside[0] > budget_bytes:
            return False
        held = 0
        for place, block in enumerate(self._blocks):
            fitting = [each for each in block.measured if self._peak_at(place, each, held) <= budget_bytes]
            if not fitting:
                return False
            held += min(each.held_bytes for each in fitting)
        return True

    def _peak_at(self, place: int, measured: MeasuredPartition, held: int) -> int:
        after = held + measured.held_bytes
        return max(
            self._bases.forward[place] + held + measured.forward_bytes,
            self._bases.backward[place] + after + measured.backward_bytes,
            self._bases.outside[place + 1] + after,
        )


def _bases_of(profile: CompiledProfile) -> _Bases:
    num_blocks = len(profile.blocks)
    forward, backward, outside = [0] * num_blocks, [0] * num_blocks, [0] * (num_blocks + 1)
    for segment in profile.segments:
        block, base = segment.block, segment.base_bytes
        if segment.kind is SegmentKind.FORWARD and block is not None and segment.num_held <= block:
            forward[block] = max(forward[block], base)
        elif segment.kind is SegmentKind.BACKWARD and block is not None and segment.num_held <= block + 1:
            backward[block] = max(backward[block], base)
        else:
            # Other blocks run while this one holds what it saved: then its largest partition counts.
            above = profile.blocks[block].measured if block is not None else ()
            is_forward = segment.kind is SegmentKind.FORWARD
            base += max((each.forward_bytes if is_forward else each.backward_bytes for each in above), default=0)
            outside[segment.num_held] = max(outside[segment.num_held], base)
    return _Bases(tuple(forward), tuple(backward), tuple(outside))


def _undominated(held: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the places of the states that no other one dominates, the smallest first."""
    order = np.lexsort((seconds, held))
    fastest = np.minimum.accumulate(seconds[order])
    is_kept = np.ones(len(order), dtype=bool)
    is_kept[1:] = seconds[order][1:] < fastest[:-1]
    order = order[is_kept]
    if len(order) > _MOST_STATES:
        order = order[np.unique(np.linspace(0, len(order) - 1, _MOST_STATES).astype(np.int64))]
    return np.asarray(order)
