"""The allocator played with numbers: its rules one by one, and long histories against a plainer player."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memfit.planning.simulate.allocator import LargeBlocks, is_uneven, margin_bytes, segment_bytes

MIB = 2**20


def test_segments_are_shared_below_ten_mib_and_in_steps_of_two_beyond() -> None:
    assert segment_bytes(MIB + 512) == segment_bytes(10 * MIB - 512) == 20 * MIB
    assert segment_bytes(10 * MIB) == 10 * MIB
    assert segment_bytes(10 * MIB + 512) == 12 * MIB


def test_what_is_left_of_a_segment_is_cut_off_if_it_is_more_than_one_mib() -> None:
    blocks = LargeBlocks()
    blocks.allocate(12 * MIB + 512)
    assert blocks.allocated_bytes == 12 * MIB + 512
    blocks.allocate(13 * MIB)
    assert blocks.allocated_bytes == 12 * MIB + 512 + 14 * MIB


def test_a_freed_block_is_handed_out_whole_to_what_is_a_little_smaller() -> None:
    blocks = LargeBlocks()
    address = blocks.allocate(50 * MIB)
    blocks.free(address)
    assert blocks.allocated_bytes == 0
    assert blocks.allocate(49 * MIB + MIB // 4) == address
    assert blocks.allocated_bytes == 50 * MIB


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    blocks = LargeBlocks()
    large, small = blocks.allocate(80 * MIB), blocks.allocate(40 * MIB)
    blocks.free(large)
    blocks.free(small)
    assert blocks.allocate(30 * MIB) == small
    assert blocks.allocate(11 * MIB) == large


def test_free_neighbours_become_one_block() -> None:
    blocks = LargeBlocks()
    first, second, third = (blocks.allocate(6 * MIB) for _ in range(3))
    blocks.free(first)
    blocks.free(third)
    blocks.free(second)
    # All of the shared segment of 20 MiB, with the 2 that were left of it.
    assert blocks.allocate(20 * MIB) == first


class PlainPlayer:
    """The same rules on lists of [bytes, is free], one for each segment."""

    def __init__(self) -> None:
        self.segments: list[list[list[int]]] = []

    @property
    def allocated_bytes(self) -> int:
        return sum(size for segment in self.segments for size, is_free in segment if not is_free)

    def allocate(self, num_bytes: int) -> list[int]:
        free = [
            (block[0], number, place)
            for number, segment in enumerate(self.segments)
            for place, block in enumerate(segment)
            if block[1] and block[0] >= num_bytes
        ]
        if not free:
            self.segments.append([[segment_bytes(num_bytes), 1]])
            return self.allocate(num_bytes)
        size, number, place = min(free)
        block = self.segments[number][place]
        if size - num_bytes > MIB:
            self.segments[number].insert(place + 1, [size - num_bytes, 1])
            block[0] = num_bytes
        block[1] = 0
        return block

    def free(self, block: list[int]) -> None:
        block[1] = 1
        for segment in self.segments:
            place = 0
            while place + 1 < len(segment):
                if segment[place][1] and segment[place + 1][1]:
                    segment[place + 1][0] += segment.pop(place)[0]
                else:
                    place += 1


@given(st.lists(st.tuples(st.booleans(), st.integers(2 * 1024 + 1, 60 * 1024), st.integers(0, 100)), max_size=60))
def test_long_histories_count_as_a_plainer_player_does(calls: list[tuple[bool, int, int]]) -> None:
    blocks, plain = LargeBlocks(), PlainPlayer()
    live: list[tuple[int, list[int]]] = []
    for is_free, num_units, which in calls:
        if is_free and live:
            address, block = live.pop(which % len(live))
            blocks.free(address)
            plain.free(block)
        else:
            live.append((blocks.allocate(512 * num_units), plain.allocate(512 * num_units)))
        assert blocks.allocated_bytes == plain.allocated_bytes
    for address, _ in live:
        blocks.free(address)
    assert blocks.allocated_bytes == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30), st.integers(0, 100)), max_size=60))
def test_multiples_of_two_mib_count_what_they_take(calls: list[tuple[bool, int, int]]) -> None:
    blocks = LargeBlocks()
    live: list[tuple[int, int]] = []
    for is_free, half_size, which in calls:
        if is_free and live:
            blocks.free(live.pop(which % len(live))[0])
        else:
            live.append((blocks.allocate(2 * MIB * half_size), 2 * MIB * half_size))
        assert blocks.allocated_bytes == sum(size for _, size in live)


def test_only_large_sizes_that_are_no_multiples_of_two_mib_are_uneven_and_need_a_margin() -> None:
    assert [is_uneven(size) for size in (512, MIB, MIB + 512, 3 * MIB, 4 * MIB)] == [False, False, True, True, False]
    assert margin_bytes([]) == margin_bytes([512, 2 * MIB, MIB]) == 2 * MIB
    assert margin_bytes([MIB + 512, 2 * MIB, 3 * MIB]) == 4 * MIB
    assert margin_bytes([MIB + 512] * 6) == margin_bytes([MIB + 512] * 500) == 8 * MIB
