"""What a step allocates and frees, in order, and how much an allocator counts for it at most."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from memfit.planning.simulate.allocator import LARGEST_SMALL_BYTES, LargeBlocks


class Buffer(NamedTuple):
    """So many bytes from one position of a step to another, both included; beyond the last, until the next step."""

    num_bytes: int
    first: int
    last: int


class Traffic(NamedTuple):
    """The buffers of a step, and what each of its positions takes beside them, only for as long as it lasts."""

    buffers: Sequence[Buffer]
    workspace_bytes: Sequence[int]


class Allocations:
    """An allocator, on which steps run one after the other."""

    def __init__(self) -> None:
        self._blocks = LargeBlocks()
        # What the last step left behind, gradients above all, goes when the next one begins.
        self._left_behind: list[int] = []

    def copy(self) -> Allocations:
        """Return another that stands where this one does."""
        other = Allocations()
        other._blocks, other._left_behind = self._blocks.copy(), self._left_behind.copy()
        return other

    def run(self, traffic: Traffic) -> int:
        """Run a step, and return the most that is counted for what it makes."""
        blocks, num_positions = self._blocks, len(traffic.workspace_bytes)
        for address in self._left_behind:
            blocks.free(address)
        large = [buffer for buffer in traffic.buffers if _is_large(buffer.num_bytes) and buffer.first <= buffer.last]
        made: list[list[int]] = [[] for _ in range(num_positions)]
        gone: list[list[int]] = [[] for _ in range(num_positions)]
        for number, (_, first, last) in enumerate(large):
            made[first].append(number)
            if last < num_positions:
                gone[last].append(number)
        address_of: dict[int, int] = {}
        counts: list[int] = []
        for position, workspace_bytes in enumerate(traffic.workspace_bytes):
            for number in made[position]:
                address_of[number] = blocks.allocate(large[number].num_bytes)
            most_bytes = blocks.allocated_bytes
            if _is_large(workspace_bytes):
                workspace = blocks.allocate(workspace_bytes)
                most_bytes = blocks.allocated_bytes
                blocks.free(workspace)
            counts.append(most_bytes)
            for number in gone[position]:
                blocks.free(address_of.pop(number))
        self._left_behind = list(address_of.values())
        return max((a + b for a, b in zip(counts, _small_bytes(traffic), strict=True)), default=0)


def _small_bytes(traffic: Traffic) -> list[int]:
    """Return what is live at each position of what is counted to the byte."""
    change = [0] * (len(traffic.workspace_bytes) + 1)
    for num_bytes, first, last in traffic.buffers:
        if not _is_large(num_bytes) and first <= last:
            change[first] += num_bytes
            if last + 1 < len(change):
                change[last + 1] -= num_bytes
    return [
        live + (0 if _is_large(workspace_bytes) else workspace_bytes)
        for live, workspace_bytes in zip(accumulate(change), traffic.workspace_bytes, strict=False)
    ]


def _is_large(num_bytes: int) -> bool:
    return num_bytes > LARGEST_SMALL_BYTES
