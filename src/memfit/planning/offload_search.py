"""Finds plans that also offload: what a plan without offloading holds may go to the host, as far as the link carries.

Offloading beside the computing costs nothing, recomputing always does. So for a budget the best plan is often that of a
larger budget, with enough of what it holds sent away. From plans spread over the frontier without offloading, values
are sent in the order in which they are made: the first ones are wanted back last. How many, is tried in steps; also
whether to send only what the link can take at that moment, or all, which waits; and with windows of several sizes. As
everywhere, all that is tried is judged by the simulator, and the budget plays no part: a smaller one never gets a
faster or a larger plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set

from memfit.graph.model_profile import Link, Phase, Replay
from memfit.planning.link_time import COUNTED_SHARE, out_seconds
from memfit.planning.offload_rules import Offloading
from memfit.planning.simulator import judged
from memfit.planning.step import NEVER, Step
from memfit.planning.trade_off import Candidate

# Smaller ones take the host more time than they are worth.
SMALLEST_OFFLOADED_BYTES = 2**20
# How many simulations a step of one op could pay for, and the limits of what a step gets.
_EFFORT_OPS = 4_000_000
_LEAST_TRIES, _MOST_TRIES = 240, 4_000
# As multiples of the value of middle size among those that a plan holds.
_WINDOWS = (1, 2, 4, 8)
_NUM_AMOUNTS = 10


def host_bytes_of(step: Step, values: Iterable[int]) -> int:
    """Return what these values take of the host's memory: torch rounds pinned blocks up to powers of two."""
    return sum(1 << (step.profile.values[value].num_bytes - 1).bit_length() for value in values)


def with_offloading(
    step: Step,
    frontier: Sequence[Candidate],
    kept: Set[int],
    host_budget_bytes: int,
    earlier: Sequence[Candidate] = (),
) -> tuple[Candidate, ...]:
    """Return the plans of ``frontier``, ``earlier`` ones and such that also offload: unbeaten ones, fastest first.

    None of the ``kept`` values is offloaded, and never more than the host has room for.
    """
    link = step.profile.link
    assert link is not None
    eligible = [value for value in may_be_offloaded(step) if value not in kept]
    candidates = [*frontier, *earlier, *_tried(step, link, frontier, eligible, host_budget_bytes)]
    candidates.sort(
        key=lambda c: (c.added_seconds, c.peak_bytes, len(c.offloading.values), sorted(c.offloading.values))
    )
    unbeaten: list[Candidate] = []
    for candidate in candidates:
        if not unbeaten or candidate.peak_bytes < unbeaten[-1].peak_bytes:
            unbeaten.append(candidate)
    return tuple(unbeaten)


def most_offloaded_bytes(step: Step, added_seconds: float, host_budget_bytes: int) -> int:
    """Return what a plan can offload at most if it adds no more than ``added_seconds`` to the step.

    All that is offloaded goes out over the link, one after the other, within the step. A plan that held it instead
    would take at most so much more memory at any time, and recompute the same: so a plan within a budget that offloads
    is no faster than the fastest without offloading within a budget that is larger by this.
    """
    link = step.profile.link
    assert link is not None
    step_seconds = max(step.profile.step_seconds, sum(step.op_seconds))
    carried = int(COUNTED_SHARE * link.out_bytes_per_second * (step_seconds + added_seconds))
    values = may_be_offloaded(step)
    margins = sum(step.value_bytes[value] - step.profile.values[value].num_bytes for value in values)
    return min(carried, host_budget_bytes, sum(step.profile.values[value].num_bytes for value in values)) + margins


def may_be_offloaded(step: Step) -> list[int]:
    """Return the values that can be sent away at all, in the order in which they are made, one of each op at most.

    They are what an op returned, alone in their storage and never written over, and wanted by nobody but the backward
    pass from before its first read on. Only what was seen to come back is: elsewhere, a kernel that nobody hears may
    write after the copy has left.
    """
    ops, values = step.profile.ops, step.profile.values
    first_read = step.last_time_before_reads
    largest_of_op: dict[int, int] = {}
    for value in step.plannable:
        op = ops[step.value_op[value]]
        storage = step.value_storage[value]
        if (
            values[value].num_bytes >= SMALLEST_OFFLOADED_BYTES
            and op.phase is Phase.FORWARD
            and op.replay is Replay.YES
            and values[value].comes_back
            and not op.rewrites
            and step.overwritten_at[value] == NEVER
            and len(step.values_of_storage[storage]) == 1
            and step.natural_end_of_storage[storage] <= first_read
        ):
            best = largest_of_op.get(step.value_op[value])
            if best is None or values[best].num_bytes < values[value].num_bytes:
                largest_of_op[step.value_op[value]] = value
    return [largest_of_op[op] for op in sorted(largest_of_op)]


def held_by(step: Step, recomputed: frozenset[int], eligible: Iterable[int]) -> list[int]:
    """Return those of the ``eligible`` values that a plan holds for the backward pass, and whose bytes it reads."""
    dropping_ops = {step.value_op[value] for value in recomputed}
    sources = {value for op in _replayed(step, recomputed) for value in step.op_inputs[op]}
    return [
        value
        for value in eligible
        if value not in recomputed
        and step.value_op[value] not in dropping_ops
        and (step.read_rank_of_value[value] < NEVER or value in sources)
    ]


def _replayed(step: Step, recomputed: frozenset[int]) -> set[int]:
    """Return the ops that are run again, for a read or for one another."""
    wanted = {value for value in recomputed if step.read_rank_of_value[value] < NEVER}
    replayed: set[int] = set()
    while wanted:
        op = step.value_op[wanted.pop()]
        if op not in replayed:
            replayed.add(op)
            wanted.update(value for value in step.op_inputs[op] if value in recomputed)
    return replayed


def _tried(
    step: Step, link: Link, frontier: Sequence[Candidate], eligible: list[int], host_budget_bytes: int
) -> Iterator[Candidate]:
    num_tries = min(max(_EFFORT_OPS // max(step.num_ops, 1), _LEAST_TRIES), _MOST_TRIES)
    num_starts = max(num_tries // (2 * len(_WINDOWS) * _NUM_AMOUNTS), 2)
    seen: set[tuple[frozenset[int], Offloading]] = set()
    for start in _spread(frontier, num_starts):
        held = held_by(step, start.recomputed, eligible)
        if not held:
            continue
        sizes = sorted(step.profile.values[value].num_bytes for value in held)
        for window_bytes in (multiple * sizes[len(sizes) // 2] for multiple in _WINDOWS):
            for sent in (_as_the_link_carries(step, link, held, window_bytes), held):
                for count in sorted({-(-len(sent) * part // _NUM_AMOUNTS) for part in range(1, _NUM_AMOUNTS + 1)}):
                    offloading = Offloading(frozenset(sent[:count]), window_bytes)
                    key = (start.recomputed, offloading)
                    if key in seen or host_bytes_of(step, offloading.values) > host_budget_bytes:
                        continue
                    seen.add(key)
                    yield Candidate(start.recomputed, *judged(step, start.recomputed, offloading), offloading)


def _spread(frontier: Sequence[Candidate], most: int) -> list[Candidate]:
    """Return so many plans, spread evenly over the memory between the largest and the smallest."""
    high, low = frontier[0].peak_bytes, frontier[-1].peak_bytes
    bounds = [high - (high - low) * k // max(most - 1, 1) for k in range(most)]
    places = {next(i for i, entry in enumerate(frontier) if entry.peak_bytes <= bound) for bound in bounds}
    return [frontier[place] for place in sorted(places)]


def _as_the_link_carries(step: Step, link: Link, held: list[int], window_bytes: int) -> list[int]:
    """Return the values that the link can take when they are made without more than the window piling up."""
    sent: list[int] = []
    now, free_at, op = 0.0, 0.0, 0
    for value in held:
        now += sum(step.op_seconds[op : step.value_op[value] + 1])
        op = step.value_op[value] + 1
        seconds = out_seconds(link, step.profile.values[value].num_bytes)
        if max(free_at - now, 0.0) + seconds <= out_seconds(link, window_bytes):
            free_at = max(free_at, now) + seconds
            sent.append(value)
    return sent
