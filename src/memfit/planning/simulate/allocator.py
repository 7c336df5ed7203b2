"""CUDA's caching allocator in numbers: what it counts for the large buffers of a step.

It keeps what is freed, and hands it out again: the smallest free block that is large enough. What a block has too much
is split off if it is more than 1 MiB; else the whole block is handed out, and counted. Free neighbours become one block
again. Where nothing fits, it takes a segment from the device: of 20 MiB for less than 10, else in steps of 2 MiB.
Buffers of up to 1 MiB have segments of their own, which are split to the byte.

So where all large sizes are multiples of 2 MiB, a buffer counts what it takes. Where they are not, up to 1 MiB too much
is counted for each, and how much depends on what was freed before: 8 to 110 MiB of the peaks of ResNet-152 on an H200.
The measured peaks of 62 plans of four models were never more than 2 MiB above what this computes, and Mixtral's 22 were
what it computes to the byte (docs/performance.md).

These are the rules of torch 2.11 to 2.13 (c10/cuda/CUDACachingAllocator.cpp) with its default settings, for one
stream: no rounding to parts of powers of two, no largest block to split. With expandable segments all blocks are split
to the byte, and a buffer counts what it takes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

_MIB = 2**20
# Up to this size, a buffer comes from segments that are split to the byte; and no less than this is split off.
LARGEST_SMALL_BYTES = _MIB
_SHARED_SEGMENT_BYTES, _LEAST_OWN_SEGMENT_BYTES, _SEGMENT_STEP_BYTES = 20 * _MIB, 10 * _MIB, 2 * _MIB
# Segments lie so far apart that their blocks are never neighbours.
_APART_BYTES = 2**40
# What steps may take more than computed: 1 MiB on the GPT, whose sizes are even, and up to 6 MiB on ResNet-152.
_MARGIN_BYTES, _MARGIN_BYTES_OF_UNEVEN, _LARGEST_UNEVEN_MARGIN_BYTES = 2 * _MIB, _MIB, 6 * _MIB


class LargeBlocks:
    """The allocator's large blocks, by their addresses. ``allocated_bytes`` is what it counts for those handed out."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._num_segments = 0
        self._size_at: dict[int, int] = {}
        # Free blocks: by size and address, their sizes by address, and their addresses by where they end.
        self._free: list[tuple[int, int]] = []
        self._free_size_at: dict[int, int] = {}
        self._free_until: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> int:
        """Return the address of a block of at least ``num_bytes``, which are more than are small."""
        place = bisect_left(self._free, (num_bytes, 0))
        if place < len(self._free):
            address = self._free[place][1]
            block_bytes = self._take(address)
        else:
            address, block_bytes = self._num_segments * _APART_BYTES, segment_bytes(num_bytes)
            self._num_segments += 1
        if block_bytes - num_bytes > LARGEST_SMALL_BYTES:
            self._give(address + num_bytes, block_bytes - num_bytes)
            block_bytes = num_bytes
        self._size_at[address] = block_bytes
        self.allocated_bytes += block_bytes
        return address

    def free(self, address: int) -> None:
        """Take the block at ``address`` back."""
        num_bytes = self._size_at.pop(address)
        self.allocated_bytes -= num_bytes
        if address + num_bytes in self._free_size_at:
            num_bytes += self._take(address + num_bytes)
        before = self._free_until.get(address)
        if before is not None:
            num_bytes += self._take(before)
            address = before
        self._give(address, num_bytes)

    def _give(self, address: int, num_bytes: int) -> None:
        insort(self._free, (num_bytes, address))
        self._free_size_at[address], self._free_until[address + num_bytes] = num_bytes, address

    def _take(self, address: int) -> int:
        """Remove a free block, and return its size."""
        num_bytes = self._free_size_at.pop(address)
        del self._free_until[address + num_bytes], self._free[bisect_left(self._free, (num_bytes, address))]
        return num_bytes


def segment_bytes(num_bytes: int) -> int:
    """Return what is taken from the device for a large buffer that fits no free block."""
    if num_bytes < _LEAST_OWN_SEGMENT_BYTES:
        return _SHARED_SEGMENT_BYTES
    return -(-num_bytes // _SEGMENT_STEP_BYTES) * _SEGMENT_STEP_BYTES


def is_uneven(num_bytes: int) -> bool:
    """Return whether something may be left over where a buffer of this size is handed out."""
    return num_bytes > LARGEST_SMALL_BYTES and num_bytes % _SEGMENT_STEP_BYTES != 0


def margin_bytes(sizes: Iterable[int]) -> int:
    """Return what a step that makes buffers of these ``sizes`` may take beyond what is computed here."""
    for_uneven_ones = sum(map(is_uneven, sizes)) * _MARGIN_BYTES_OF_UNEVEN
    return _MARGIN_BYTES + min(for_uneven_ones, _LARGEST_UNEVEN_MARGIN_BYTES)
