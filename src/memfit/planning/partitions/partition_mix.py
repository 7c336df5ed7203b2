"""Which partition each compiled block uses: a dynamic program over the blocks in the order in which they run.

The state before a block is what the blocks before it hold until their backward passes, and what the last of them saves
of its output, which the block may hold as well. It decides what is left for the block's own passes and for what runs
outside blocks, so that each constraint is local::

    base of the block's forward pass  + held before          + forward bytes of the partition           ≤ budget
    base of its backward pass         + held with its own    + output and backward bytes of the partition ≤ budget
    base of a segment outside blocks  + held by the blocks that hold something there                    ≤ budget

States that hold more and take longer than another with the same output are dropped. The result is the fastest mixture
of the menu.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memfit.graph.compiled_data.compiled_blocks import (
    CompiledProfile,
    MeasuredPartition,
    SegmentKind,
    held_by,
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
        return self._fastest(budget_bytes, weighs_seconds=True)

    def _fastest(self, budget_bytes: int, *, weighs_seconds: bool) -> Choice | None:
        """Return such a choice; any, where seconds do not count: then what holds the least dominates all else."""
        if self._bases.outside[0] > budget_bytes:
            return None
        held, outputs = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        seconds = np.zeros(1)
        steps: list[tuple[np.ndarray, np.ndarray]] = []
        for place, block in enumerate(self._blocks):
            after = np.array([held + each.held_bytes + (0 if each.keeps_input else outputs) for each in block.measured])
            most_before = budget_bytes - np.array([self._above_before(place, each) for each in block.measured])
            most_after = budget_bytes - np.array([self._above_after(place, each) for each in block.measured])
            menu, states = np.nonzero((held <= most_before[:, None]) & (after <= most_after[:, None]))
            if not len(states):
                return None
            seconds_of = np.array([each.seconds * weighs_seconds for each in block.measured])
            outputs_of = np.array([self._passed_on(place, each) for each in block.measured], dtype=np.int64)
            held, seconds, outputs = after[menu, states], seconds[states] + seconds_of[menu], outputs_of[menu]
            kept = _undominated(held, seconds, outputs)
            held, seconds, outputs = held[kept], seconds[kept], outputs[kept]
            steps.append((states[kept], menu[kept]))
        state = int(np.argmin(seconds))
        choice: list[int] = []
        for states, menu in reversed(steps):
            choice.append(int(menu[state]))
            state = int(states[state])
        return tuple(reversed(choice))

    def peak_bytes(self, choice: Choice) -> int:
        """Return the predicted peak of the step."""
        measured = [block.measured[number] for block, number in zip(self._blocks, choice, strict=True)]
        held, peak = 0, self._bases.outside[0]
        for place, (each, own) in enumerate(zip(measured, held_by(measured), strict=True)):
            peak = max(peak, held + self._above_before(place, each), held + own + self._above_after(place, each))
            held += own
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
            if self._fastest(middle, weighs_seconds=False) is not None:
                high = middle
            else:
                low = middle + 1
        return high

    def _above_before(self, place: int, measured: MeasuredPartition) -> int:
        """Return what is live at most in the block's forward pass, besides what the blocks before it hold."""
        return self._bases.forward[place] + measured.forward_bytes

    def _above_after(self, place: int, measured: MeasuredPartition) -> int:
        """Return what is live at most while the block and those before it hold, and none after it, besides that."""
        return max(
            self._bases.backward[place] + measured.output_bytes + measured.backward_bytes,
            self._bases.outside[place + 1],
        )

    def _passed_on(self, place: int, measured: MeasuredPartition) -> int:
        """Return what the next block may have to hold of this one's output."""
        is_last = place + 1 == len(self._blocks)
        is_kept = is_last or all(each.keeps_input for each in self._blocks[place + 1].measured)
        return 0 if is_kept else measured.output_bytes


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
            base += max(
                (each.forward_bytes if is_forward else each.output_bytes + each.backward_bytes for each in above),
                default=0,
            )
            outside[segment.num_held] = max(outside[segment.num_held], base)
    return _Bases(tuple(forward), tuple(backward), tuple(outside))


def _undominated(held: np.ndarray, seconds: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Return the places of the states that no other one with the same output dominates, the smallest first."""
    order = np.lexsort((seconds, held))
    is_kept = np.zeros(len(order), dtype=bool)
    for output_bytes in np.unique(outputs):
        alike = outputs[order] == output_bytes
        fastest = np.minimum.accumulate(seconds[order][alike])
        better = np.ones(len(fastest), dtype=bool)
        better[1:] = seconds[order][alike][1:] < fastest[:-1]
        is_kept[alike] = better
    order = order[is_kept]
    if len(order) > _MOST_STATES:
        order = order[np.unique(np.linspace(0, len(order) - 1, _MOST_STATES).astype(np.int64))]
    return np.asarray(order)
