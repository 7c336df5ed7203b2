"""CUDA's caching allocator, played with numbers: what it counts for the large buffers of a step.

It keeps what is freed, and hands it out again: the smallest free block that is large enough. What a block has too much
is cut off if it is more than 1 MiB; else the whole block is handed out, and counted. Free neighbours become one block
again. Where nothing fits, it takes a segment from the device: of 20 MiB for less than 10, else in steps of 2 MiB.
Buffers of up to 1 MiB have segments of their own, which are cut to the byte.

So where all large sizes are multiples of 2 MiB, a buffer counts what it takes. Where they are not, up to 1 MiB too much
is counted for each, and how much depends on what was freed before: 8 to 110 MiB of the peaks of ResNet-152 on an H200.
Played through, the peaks of 62 plans of four models were never more than 2 MiB above what this tells, and Mixtral's 22
were what it tells to the byte (docs/performance.md).

These are the rules of torch 2.11 to 2.13 (c10/cuda/CUDACachingAllocator.cpp) as they are unless told otherwise, for one
stream: no rounding to parts of powers of two, no largest block to split. With expandable segments all blocks are cut to
the byte, and there is nothing to play.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

_MIB = 2**20
# Up to this size, a buffer comes from segments that are cut to the byte; and what is no more than this is not cut off.
LARGEST_SMALL_BYTES = _MIB
_SHARED_SEGMENT_BYTES, _LEAST_OWN_SEGMENT_BYTES, _SEGMENT_STEP_BYTES = 20 * _MIB, 10 * _MIB, 2 * _MIB
# Segments lie so far apart that their blocks are never neighbours.
_APART_BYTES = 2**40
# What steps may take more than this tells: 1 MiB on the GPT, whose sizes are even, and up to 6 MiB on ResNet-152.
_MARGIN_BYTES, _MARGIN_BYTES_OF_UNEVEN, _LARGEST_UNEVEN_MARGIN_BYTES = 2 * _MIB, _MIB, 6 * _MIB


class LargeBlocks:
    """The allocator's large blocks, by their addresses. ``allocated_bytes`` is what it counts for those handed out."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._num_segments = 0
        self._size_at: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._after: dict[int, int] = {}
        # By size, then by address; and the addresses among them.
        self._free: list[tuple[int, int]] = []
        self._is_free: set[int] = set()

    def copy(self) -> LargeBlocks:
        """Return another that stands where this one does."""
        other = LargeBlocks()
        other.allocated_bytes, other._num_segments = self.allocated_bytes, self._num_segments
        other._size_at, other._before, other._after = self._size_at.copy(), self._before.copy(), self._after.copy()
        other._free, other._is_free = self._free.copy(), self._is_free.copy()
        return other

    def allocate(self, num_bytes: int) -> int:
        """Return the address of a block of at least ``num_bytes``, which are more than are small."""
        place = bisect_left(self._free, (num_bytes, 0))
        if place < len(self._free):
            block_bytes, address = self._free.pop(place)
            self._is_free.remove(address)
        else:
            block_bytes, address = segment_bytes(num_bytes), self._num_segments * _APART_BYTES
            self._num_segments += 1
        left_bytes = block_bytes - num_bytes
        if left_bytes > LARGEST_SMALL_BYTES:
            self._cut_off(address, num_bytes, left_bytes)
            block_bytes = num_bytes
        self._size_at[address] = block_bytes
        self.allocated_bytes += block_bytes
        return address

    def free(self, address: int) -> None:
        """Take the block at ``address`` back."""
        self.allocated_bytes -= self._size_at[address]
        after = self._after.get(address)
        if after in self._is_free:
            self._join(address, after)
        before = self._before.get(address)
        if before in self._is_free:
            self._join(before, address)
            address = before
        insort(self._free, (self._size_at[address], address))
        self._is_free.add(address)

    def _cut_off(self, address: int, num_bytes: int, left_bytes: int) -> None:
        rest = address + num_bytes
        after = self._after.get(address)
        if after is not None:
            self._after[rest], self._before[after] = after, rest
        self._after[address], self._before[rest] = rest, address
        self._size_at[rest] = left_bytes
        insort(self._free, (left_bytes, rest))
        self._is_free.add(rest)

    def _join(self, address: int, after: int) -> None:
        """Make one block of two neighbours, of which those that are free leave the list of free ones."""
        for block in (address, after):
            if block in self._is_free:
                self._is_free.remove(block)
                del self._free[bisect_left(self._free, (self._size_at[block], block))]
        self._size_at[address] += self._size_at.pop(after)
        del self._before[after]
        beyond = self._after.pop(after, None)
        if beyond is None:
            del self._after[address]
        else:
            self._after[address], self._before[beyond] = beyond, address


def segment_bytes(num_bytes: int) -> int:
    """Return what is taken from the device for a large buffer that fits no free block."""
    if num_bytes < _LEAST_OWN_SEGMENT_BYTES:
        return _SHARED_SEGMENT_BYTES
    return -(-num_bytes // _SEGMENT_STEP_BYTES) * _SEGMENT_STEP_BYTES


def is_uneven(num_bytes: int) -> bool:
    """Return whether something may be left over where a buffer of this size is handed out."""
    return num_bytes > LARGEST_SMALL_BYTES and num_bytes % _SEGMENT_STEP_BYTES != 0


def margin_bytes(sizes: Iterable[int]) -> int:
    """Return what a step that makes buffers of these ``sizes`` may take beyond what is told here."""
    for_uneven_ones = sum(map(is_uneven, sizes)) * _MARGIN_BYTES_OF_UNEVEN
    return _MARGIN_BYTES + min(for_uneven_ones, _LARGEST_UNEVEN_MARGIN_BYTES)
