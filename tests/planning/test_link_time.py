"""Waiting for the link, against a clock that ticks through every event."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.graph.model_profile import Link
from memfit.planning.step.link_time import (
    COUNTED_SHARE,
    Arrival,
    Copies,
    Departure,
    expected_waiting,
    waiting_for,
    with_reserve,
)
from memfit.planning.step.offload_rules import numbers_freed, numbers_started
from memfit.planning.step.seconds import Seconds

# A byte a second out, two back, and a second for each copy.
LINK = Link(1.0, 2.0, seconds_per_copy=1.0, host_free_bytes=0)


def waited(link: Link, departures: list[Departure], forward_seconds: float, arrivals: list[Arrival]) -> float:
    return sum(waiting_for(link, Copies(departures, forward_seconds, arrivals, computing_seconds=100.0)))


def test_what_leaves_while_the_device_computes_costs_nothing() -> None:
    departures = [Departure(0.0, 4, []), Departure(6.0, 4, [0])]
    arrivals = [Arrival(20.0, [1]), Arrival(24.0, [0], [1]), Arrival(28.0, [], [0])]
    assert waited(LINK, departures, 12.0, arrivals) == 0.0


def test_memory_that_is_still_being_copied_is_waited_for() -> None:
    # The first copy ends at 5, and is let go of at 2.
    assert waited(LINK, [Departure(0.0, 4, []), Departure(2.0, 1, [0])], 100.0, []) == 3.0
    # At the end of the forward pass, at 3, it waits until 7 for both.
    assert waited(LINK, [Departure(0.0, 4, []), Departure(2.0, 1, [])], 3.0, []) == 4.0


def test_what_is_read_before_it_is_back_is_waited_for() -> None:
    departures = [Departure(0.0, 4, []), Departure(1.0, 4, [])]
    # Both leave by 10. The later one is started when it is read at 20, which takes until 23; the other then, until 26,
    # of which the device computes for two seconds.
    arrivals = [Arrival(20.0, [1], [1]), Arrival(20.0, [0]), Arrival(22.0, [], [0])]
    assert waited(LINK, departures, 15.0, arrivals) == 3.0 + 1.0


def test_the_device_computes_longer_while_it_copies() -> None:
    departures = [Departure(0.0, 4, []), Departure(6.0, 4, [0])]
    arrivals = [Arrival(20.0, [1]), Arrival(24.0, [0], [1]), Arrival(28.0, [], [0])]
    # Two copies of five seconds, and two of three.
    assert waited(replace(LINK, slowdown=0.25), departures, 12.0, arrivals) == 4.0


def expected_waiting_seconds(link: Link, copies: Copies, unthrottled_share: float) -> float:
    return sum(expected_waiting(link, copies, unthrottled_share))


def leaving(num_bytes: int, computing_seconds: float) -> Copies:
    """Return the copies of a step that does nothing but wait, at the end of its forward pass, for one value."""
    return Copies([Departure(0.0, num_bytes, [])], 0.0, [], computing_seconds)


def test_what_is_waited_for_in_the_forward_pass_is_told_apart() -> None:
    # The copy takes until 5, and the forward pass until 2. Coming back takes from 20 to 23.
    copies = Copies([Departure(0.0, 4, [])], 2.0, [Arrival(20.0, [0], [0])], computing_seconds=30.0)
    assert waiting_for(LINK, copies) == Seconds(3.0, 3.0)
    assert waiting_for(replace(LINK, slowdown=0.5), copies) == Seconds(3.0 + 2.5, 3.0 + 1.5)
    forward, backward = expected_waiting(replace(LINK, seconds_per_copy=0.0), copies, 0.9)
    assert forward / backward == pytest.approx((4 / 0.9 - 2) / (4 / 1.8))


def test_a_tenth_of_the_link_is_kept_for_its_hitches() -> None:
    link = replace(LINK, seconds_per_copy=0.0)
    assert with_reserve(link) == replace(link, out_bytes_per_second=0.9, back_bytes_per_second=1.8)
    # 9 seconds at the full rate, and 10 with a tenth in reserve.
    assert expected_waiting_seconds(link, leaving(9, 1000.0), 1.0) == pytest.approx(9 / COUNTED_SHARE)


def test_hitches_do_not_take_more_than_a_little_of_the_step() -> None:
    link = replace(LINK, seconds_per_copy=0.0)
    # At nine tenths of the rate it would be 1000 seconds.
    assert expected_waiting_seconds(link, leaving(900, 1000.0), 1.0) == pytest.approx(900 + 15)


def test_a_device_that_waits_computes_faster() -> None:
    link = replace(LINK, seconds_per_copy=0.0)
    without = expected_waiting_seconds(link, leaving(900, 1000.0), 1.0)
    # It waits for nearly half of the step, and would gain the same by more.
    assert expected_waiting_seconds(link, leaving(900, 1000.0), 0.9) == pytest.approx(without - 100)
    assert expected_waiting_seconds(link, leaving(9000, 1000.0), 0.9) == pytest.approx(9000 + 15 - 100)
    # 9 / 0.9 of 1010 seconds are about a hundredth; a quarter of the step would be enough for all.
    gained = 100 * (10 / 1010) / 0.25
    assert expected_waiting_seconds(link, leaving(9, 1000.0), 0.9) == pytest.approx(10 - gained)
    assert expected_waiting_seconds(link, Copies([], 0.0, [], 1000.0), 0.9) == 0.0


@given(st.integers(1, 5000), st.integers(1, 5000), st.floats(0.8, 1.0))
def test_more_to_copy_never_takes_less(one: int, other: int, unthrottled_share: float) -> None:
    link = replace(LINK, seconds_per_copy=0.0)
    less, more = (
        expected_waiting_seconds(link, leaving(num_bytes, 1000.0), unthrottled_share)
        for num_bytes in sorted([one, other])
    )
    assert 0 < less <= more + 1e-9


@pytest.mark.parametrize("window_bytes", [0, 3, 4, 5, 8, 100])
def test_what_leaves_is_freed_of_once_and_in_order(window_bytes: int) -> None:
    sizes = [4, 1, 7, 2, 2, 4]
    freed = numbers_freed(sizes, window_bytes)
    assert [number for numbers in freed for number in numbers] == list(range(len(sizes)))
    for number, _ in enumerate(sizes):
        gone = sum(len(numbers) for numbers in freed[: number + 1])
        leaving = sizes[gone : number + 1]
        assert sum(leaving) <= window_bytes
        # No more is let go of than must be.
        assert not freed[number] or sum(leaving) + sizes[gone - 1] > window_bytes


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(0, 20), st.data())
def test_every_value_is_started_once_and_no_later_than_it_is_read(
    sizes: list[int], window_bytes: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    reads: list[list[int]] = [[]]
    for number in order:
        if data.draw(st.booleans()):
            reads.append([])
        reads[-1].append(number)
    on_its_way: set[int] = set()
    seen: list[int] = []
    for numbers, (ahead, late) in zip(reads, numbers_started(reads, sizes, window_bytes), strict=True):
        on_its_way |= set(ahead)
        assert sum(sizes[number] for number in on_its_way) <= window_bytes
        left = [number for number in range(len(sizes)) if number not in {*seen, *ahead, *late}]
        assert not ahead or min(ahead) > max((n for n in left if n not in numbers), default=-1)
        assert set(late) == set(numbers) - on_its_way
        seen += [*ahead, *late]
        on_its_way -= set(numbers)
    assert sorted(seen) == list(range(len(sizes)))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(0, 20),
    st.lists(st.integers(0, 6), min_size=6, max_size=6),
)
def test_waiting_is_what_two_streams_and_two_copy_engines_take(
    made: list[tuple[int, int]], window_bytes: int, gaps: list[int]
) -> None:
    sizes = [num_bytes for _, num_bytes in made]
    freed = numbers_freed(sizes, window_bytes)
    # All is read back in the opposite order, each by a read of its own.
    order = list(reversed(range(len(sizes))))
    started = numbers_started([[number] for number in order], sizes, window_bytes)
    computing, waiting = Fraction(0), Fraction(0)
    departures, ended, free = [], [], Fraction(0)
    for (gap, num_bytes), numbers in zip(made, freed, strict=False):
        computing += gap
        departures.append(Departure(float(computing), num_bytes, numbers))
        free = max(free, computing + waiting) + 1 + num_bytes
        ended.append(free)
        for number in numbers:
            waiting += max(ended[number] - computing - waiting, 0)
    computing += 1
    forward_seconds = float(computing)
    for number in freed[-1]:
        waiting += max(ended[number] - computing - waiting, 0)
    arrivals, back, free = [], {}, Fraction(0)
    for number, gap, (ahead, late) in zip(order, gaps, started, strict=False):
        computing += gap
        for starting in (*ahead, *late):
            free = max(free, computing + waiting) + 1 + Fraction(sizes[starting], 2)
            back[starting] = free
        waiting += max(back[number] - computing - waiting, 0)
        arrivals += [Arrival(float(computing), ahead), Arrival(float(computing), late, [number])]
    assert waited(LINK, departures, forward_seconds, arrivals) == float(waiting)
