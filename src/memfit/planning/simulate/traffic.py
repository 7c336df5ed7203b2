"""What a step allocates and frees, in order, and how much an allocator counts for it at most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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
        # What the last step left behind, gradients above all, is freed when the next one begins.
        self._left_behind: list[int] = []

    def run(self, traffic: Traffic) -> int:
        """Run a step, and return the most that is counted for what it makes."""
        blocks, made, gone = self._blocks, defaultdict(list), defaultdict(list)
        for address in self._left_behind:
            blocks.free(address)
        for number, (_, first, last) in enumerate(traffic.buffers):
            if first <= last:
                made[first].append(number)
                gone[last].append(number)
        address_of: dict[int, int] = {}
        # What is counted to the byte.
        small_bytes, most_bytes = 0, 0
        for position, workspace_bytes in enumerate(traffic.workspace_bytes):
            for number in made[position]:
                num_bytes = traffic.buffers[number].num_bytes
                if num_bytes > LARGEST_SMALL_BYTES:
                    address_of[number] = blocks.allocate(num_bytes)
                else:
                    small_bytes += num_bytes
            if workspace_bytes > LARGEST_SMALL_BYTES:
                workspace = blocks.allocate(workspace_bytes)
                most_bytes = max(most_bytes, blocks.allocated_bytes + small_bytes)
                blocks.free(workspace)
            else:
                most_bytes = max(most_bytes, blocks.allocated_bytes + small_bytes + workspace_bytes)
            for number in gone[position]:
                if number in address_of:
                    blocks.free(address_of.pop(number))
                else:
                    small_bytes -= traffic.buffers[number].num_bytes
        self._left_behind = list(address_of.values())
        return most_bytes
