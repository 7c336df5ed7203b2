"""The binomial schedule: counts against the paper and a search over all sweeps, actions by one judge."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from functools import cache
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import InvalidParameterError
from memfit.layers.checkpointing.backward_sweep import (
    Action,
    Forward,
    Free,
    Restore,
    Reverse,
    Store,
    backward_sweep,
)
from memfit.layers.checkpointing.revolve import (
    advances,
    binomial_states,
    even_states,
    forward_calls,
    optimal_stride,
    repetitions,
)


def judge(actions: Iterable[Action], num_layers: int, num_slots: int, stored: Iterable[int] = ()) -> Counter[int]:
    """Carry a sweep out on states alone. Return how often each layer ran forward; any unlawful step fails."""
    slots = set(stored)
    working: int | None = None
    runs: Counter[int] = Counter()
    layers_to_reverse = list(range(num_layers))
    for action in actions:
        match action:
            case Restore(state):
                assert state == 0 or state in slots, f"{action}: nothing is held"
                working = state
            case Forward(start, stop):
                assert working == start < stop <= num_layers, f"{action} from state {working}"
                runs.update(range(start, stop))
                working = stop
            case Store(state):
                assert working == state > 0, f"{action} from state {working}"
                assert state not in slots, f"{action}: held already"
                slots.add(state)
            case Free(state):
                slots.remove(state)
            case Reverse(layer):
                assert working == layer == layers_to_reverse.pop(), f"{action} from state {working}"
        assert len(slots) <= num_slots, f"{action}: {len(slots)} slots in use"
    assert layers_to_reverse == []
    assert slots == set()
    return runs


def binomial_sweep(num_layers: int, num_slots: int) -> Iterator[Action]:
    """A forward pass that stores the binomial states, and the backward sweep from there."""
    stored = binomial_states(num_layers, num_slots)
    yield Restore(0)
    for start, stop in itertools.pairwise((0, *stored)):
        yield Forward(start, stop)
        yield Store(stop)
    if num_layers:
        yield Forward(stored[-1] if stored else 0, num_layers)
    yield from backward_sweep(num_layers, num_slots, stored)


LETTERS = {Restore: "R", Forward: "F", Store: "S", Free: "D", Reverse: "B"}


def written(actions: Iterable[Action]) -> str:
    """The actions as letters and states, such as F0-3 for a run from state 0 to 3."""
    return " ".join(LETTERS[type(action)] + "-".join(map(str, astuple(action))) for action in actions)


@cache
def fewest_backward_calls(num_layers: int, num_slots: int, stored: frozenset[int]) -> int:
    """Dijkstra over every lawful move: restore, drop, store, step forward, reverse. Knows no schedule."""
    start = (num_layers, stored, -1)
    fewest = {start: 0}
    tie_break = itertools.count()
    queue = [(0, next(tie_break), start)]
    while queue:
        calls, _, situation = heapq.heappop(queue)
        layers_left, slots, working = situation
        if layers_left == 0:
            return calls
        moves = [(0, (layers_left, slots, state)) for state in slots | {0}]
        moves += [(0, (layers_left, slots - {state}, working)) for state in slots]
        if working == layers_left - 1:
            moves.append((0, (layers_left - 1, slots, working)))
        if 0 <= working < layers_left - 1:
            moves.append((1, (layers_left, slots, working + 1)))
        if working > 0 and len(slots) < num_slots:
            moves.append((0, (layers_left, slots | {working}, working)))
        for extra, reached in moves:
            if calls + extra < fewest.get(reached, 10**9):
                fewest[reached] = calls + extra
                heapq.heappush(queue, (calls + extra, next(tie_break), reached))
    raise AssertionError("every chain can be reversed")


def subsets(states: Iterable[int], most: int) -> Iterator[tuple[int, ...]]:
    states = tuple(states)
    return itertools.chain.from_iterable(itertools.combinations(states, size) for size in range(most + 1))


@cache
def recurrence(num_steps: int, num_snapshots: int) -> int:
    """The paper's equation (2), from which its formula is proved."""
    if num_steps == 1:
        return 0
    if num_snapshots == 1:
        return num_steps * (num_steps - 1) // 2
    return min(
        stride + recurrence(stride, num_snapshots) + recurrence(num_steps - stride, num_snapshots - 1)
        for stride in range(1, num_steps)
    )


# r * l - beta(s + 1, r - 1), the published formula, with r and the binomial coefficient written out.
@pytest.mark.parametrize(
    ("num_steps", "num_snapshots", "times", "published"),
    [
        (24, 5, 3, 3 * 24 - 28),
        (14, 3, 3, 3 * 14 - 15),
        (10, 3, 2, 2 * 10 - 5),
        (56, 5, 3, 3 * 56 - 28),
        (100, 10, 3, 3 * 100 - 78),
        (1000, 10, 4, 4 * 1000 - 364),
        (1000, 1, 999, 999 * 1000 // 2),
        (7, 6, 1, 7 - 1),
    ],
)
def test_counts_are_the_published_ones(num_steps: int, num_snapshots: int, times: int, published: int) -> None:
    assert repetitions(num_steps, num_snapshots) == times
    assert advances(num_steps, num_snapshots) == published


def test_24_steps_and_5_snapshots_are_44_forward_calls_over_23_layers_with_4_slots() -> None:
    assert advances(24, 5) == 44
    assert forward_calls(23, 4) == 44
    assert judge(binomial_sweep(23, 4), 23, 4).total() == 44


def test_24_layers_with_5_slots_take_42_forward_calls() -> None:
    assert judge(binomial_sweep(24, 5), 24, 5).total() == 42


@given(st.integers(1, 60), st.integers(1, 12))
def test_the_formula_equals_the_recurrence(num_steps: int, num_snapshots: int) -> None:
    assert advances(num_steps, num_snapshots) == recurrence(num_steps, num_snapshots)


@given(st.integers(2, 60), st.integers(2, 12))
def test_the_stride_is_an_optimal_one_and_no_optimal_one_is_nearer_to_even(num_steps: int, num_snapshots: int) -> None:
    optimal = [
        stride
        for stride in range(1, num_steps)
        if stride + recurrence(stride, num_snapshots) + recurrence(num_steps - stride, num_snapshots - 1)
        == recurrence(num_steps, num_snapshots)
    ]
    even = -(-num_steps // num_snapshots)
    chosen = optimal_stride(num_steps, num_snapshots)
    assert chosen in optimal
    assert abs(chosen - even) == min(abs(stride - even) for stride in optimal)


@pytest.mark.parametrize("num_slots", range(4))
@pytest.mark.parametrize("num_layers", range(8))
def test_no_sweep_at_all_makes_fewer_forward_calls(num_layers: int, num_slots: int) -> None:
    fewest = num_layers + min(
        fewest_backward_calls(num_layers, num_slots, frozenset(stored))
        for stored in subsets(range(1, num_layers), num_slots)
    )
    assert forward_calls(num_layers, num_slots) == fewest
    assert judge(binomial_sweep(num_layers, num_slots), num_layers, num_slots).total() == fewest


@given(st.integers(0, 200), st.integers(0, 30))
def test_a_binomial_sweep_is_lawful_and_makes_the_promised_calls(num_layers: int, num_slots: int) -> None:
    runs = judge(binomial_sweep(num_layers, num_slots), num_layers, num_slots)
    assert runs.total() == forward_calls(num_layers, num_slots)
    assert max(runs.values(), default=0) <= repetitions(num_layers + 1, num_slots + 1)


@pytest.mark.parametrize(
    ("num_layers", "num_slots", "expected"),
    [
        (0, 3, "R0"),
        (1, 0, "R0 F0-1 R0 B0"),
        (3, 0, "R0 F0-3 R0 F0-2 B2 R0 F0-1 B1 R0 B0"),
        (3, 2, "R0 F0-1 S1 F1-2 S2 F2-3 R2 D2 B2 R1 D1 B1 R0 B0"),
        (
            6,
            2,
            "R0 F0-3 S3 F3-5 S5 F5-6 R5 D5 B5 R3 F3-4 B4 R3 D3 B3 R0 F0-1 S1 F1-2 B2 R1 D1 B1 R0 B0",
        ),
    ],
)
def test_small_sweeps_read_as_written_down(num_layers: int, num_slots: int, expected: str) -> None:
    assert written(binomial_sweep(num_layers, num_slots)) == expected


def test_actions_have_readable_reprs() -> None:
    assert repr(Forward(3, 5)) == "Forward(start=3, stop=5)"
    assert repr(Store(5)) == "Store(state=5)"


@given(st.integers(1, 300), st.data())
def test_binomial_states_use_every_slot_and_bound_the_longest_replay(num_layers: int, data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(0, num_layers - 1))
    states = binomial_states(num_layers, num_slots)
    assert len(states) == num_slots
    times = repetitions(num_layers + 1, num_slots + 1)
    bounds = (0, *states, num_layers + 1)
    longest_replay = max(above - below - 1 for below, above in itertools.pairwise(bounds))
    assert longest_replay <= max(comb(num_slots + times, num_slots + 1) - 1, times)


def test_binomial_states_leave_out_the_chains_output_which_no_layer_reads() -> None:
    assert binomial_states(3, 9) == (1, 2)
    assert binomial_states(1, 1) == ()


@given(st.integers(1, 300), st.data())
def test_even_states_have_the_shortest_longest_replay(num_layers: int, data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(0, num_layers - 1))
    states = even_states(num_layers, num_slots)
    assert len(set(states)) == num_slots
    bounds = (0, *states, num_layers + 1)
    longest_replay = max(above - below - 1 for below, above in itertools.pairwise(bounds))
    assert longest_replay == -(-(num_layers + 1) // (num_slots + 1)) - 1


def kept_only(num_layers: int, num_slots: int, kept: tuple[int, ...]) -> int:
    """The calls of a backward sweep that keeps exactly these states: Revolve on each segment, from the top."""
    bounds = (0, *kept, num_layers)
    return sum(
        advances(above - below, num_slots - rank + 1) for rank, (below, above) in enumerate(itertools.pairwise(bounds))
    )


@given(st.integers(1, 40), st.integers(0, 7), st.data())
def test_a_backward_sweep_is_lawful_from_any_states_and_gives_up_the_lowest_while_that_saves_calls(
    num_layers: int, num_slots: int, data: st.DataObject
) -> None:
    stored = sorted(data.draw(st.sets(st.integers(1, num_layers), max_size=num_slots)))
    calls = judge(backward_sweep(num_layers, num_slots, stored), num_layers, num_slots, stored).total()
    useful = tuple(state for state in stored if state < num_layers)
    fewest = kept_only(num_layers, num_slots, useful)
    while useful and kept_only(num_layers, num_slots, useful[1:]) < fewest:
        useful = useful[1:]
        fewest = kept_only(num_layers, num_slots, useful)
    assert calls == fewest


def test_settling_at_the_start_what_to_keep_costs_at_most_two_calls_on_small_chains() -> None:
    excess: Counter[int] = Counter()
    for num_layers, num_slots in itertools.product(range(1, 8), range(4)):
        for stored in subsets(range(1, num_layers), num_slots):
            calls = judge(backward_sweep(num_layers, num_slots, stored), num_layers, num_slots, stored).total()
            excess[calls - fewest_backward_calls(num_layers, num_slots, frozenset(stored))] += 1
    assert excess == {0: 191, 1: 4, 2: 1}


def test_boundaries_with_a_slot_each_cost_at_most_two_percent_more_calls_than_the_best_of_them() -> None:
    for num_layers, interval in itertools.product(range(2, 13), range(1, 7)):
        boundaries = [layer + 1 for layer in range(0, num_layers - 1, interval)]
        num_slots = len(boundaries)
        calls = judge(backward_sweep(num_layers, num_slots, boundaries), num_layers, num_slots, boundaries).total()
        fewest = min(kept_only(num_layers, num_slots, kept) for kept in subsets(boundaries, num_slots))
        assert num_layers + calls <= 1.02 * (num_layers + fewest)


@pytest.mark.parametrize(
    ("stored", "given_up"),
    [((1,), "D1"), ((87,), "R87")],
)
def test_a_state_next_to_the_input_gives_up_its_slot_to_a_long_segment(stored: tuple[int], given_up: str) -> None:
    assert written(backward_sweep(100, 1, stored)).split()[0] == given_up


def test_a_segment_that_fits_the_empty_slots_is_replayed_once() -> None:
    runs = judge(backward_sweep(24, 9, [1, 5, 9, 13, 17, 21]), 24, 9, [1, 5, 9, 13, 17, 21])
    recomputed_once = {layer for layer in range(23) if layer + 1 not in (1, 5, 9, 13, 17, 21)}
    assert runs == Counter(recomputed_once)


@pytest.mark.parametrize("num_slots", [1, 10, 32, 500, 999])
def test_a_sweep_over_a_thousand_layers_is_planned_within_a_second(num_slots: int) -> None:
    started = time.perf_counter()
    actions = list(binomial_sweep(1000, num_slots))
    # It takes milliseconds; the limit is the promise, and wide enough for a busy machine.
    assert time.perf_counter() - started < 1.0
    assert judge(actions, 1000, num_slots).total() == forward_calls(1000, num_slots)


def test_negative_counts_are_refused_by_name() -> None:
    with pytest.raises(InvalidParameterError, match="num_slots must be a whole number, at least 0; got -1"):
        forward_calls(3, -1)
