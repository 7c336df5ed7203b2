"""Plans for the lowest budgets: hold what crosses a few places of the forward pass, recompute all between them.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), with segments of unequal length. When the
backward pass comes to a segment, what is held of later segments is gone; so with room for M bytes, a segment may take M
less what is held before it, and the first segments are the longest. On a chain of N equal layers that is about √(2N)
held or replayed at a time, against 2√N for equal segments. On the other hand, gradients of weights pile up while the
backward pass goes on: the last segments, which it comes to first, have that much more room.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import numpy as np

from memfit.graph.model_profile import Phase
from memfit.planning.candidates.min_cut import HoldOrReplay
from memfit.planning.candidates.pool import Pool
from memfit.planning.candidates.price_sweep import swept_cuts
from memfit.planning.step import NEVER, Bytes, Step

# Each room is this much smaller than the one before.
_ROOM_RATIO = 0.8
_MOST_ROOMS = 40


# How many cuts a step of one op could pay for in sweeps with held borders, the limits to their number, and their tilts.
_EFFORT_OPS, _FEWEST_CUTS, _MOST_CUTS = 60_000, 16, 80
_FEWEST_CUTS_OF_BORDERS = 8
_TILTS = (0.5, 3.0)


def segments(pool: Pool) -> Iterator[frozenset[int]]:
    """Yield plans with segments, and price sweeps in which the borders of the best of those are held.

    Leaving this out costs up to 0.2 points of overhead (`benchmarks/ablation.py`).
    """
    step = pool.step
    borders_of = {pool.add(recomputed).recomputed: held for held, recomputed in segmented_choices(step)}
    best = [borders_of[entry.recomputed] for entry in pool.frontier() if entry.recomputed in borders_of]
    num_cuts = min(max(_EFFORT_OPS // max(step.num_ops, 1), _FEWEST_CUTS), _MOST_CUTS)
    most_cuts = max(num_cuts // max(len(best) * len(_TILTS), 1), _FEWEST_CUTS_OF_BORDERS)
    for held in reversed(best):
        if num_cuts <= 0:
            break
        graph = HoldOrReplay(step, step.last_time_before_reads, pool.may_be_recomputed - held)
        for tilt in _TILTS:
            num_cuts -= most_cuts
            yield from (cut.recomputed for cut in swept_cuts(step, graph, tilt=tilt, most_cuts=most_cuts))


def segmented_choices(step: Step) -> Iterator[tuple[set[int], set[int]]]:
    """Yield, for smaller and smaller rooms, what to hold at the borders and what to recompute between them."""
    last_use = _last_forward_use(step)
    end = step.close_time
    saved_bytes = [0] * (end + 1)
    crossing_change = [0] * (end + 2)
    crossers: list[tuple[int, int, int]] = []
    for value in step.plannable:
        made_at, num_bytes = step.value_op[value], step.value_bytes[value]
        if step.num_saves_of_value[value]:
            saved_bytes[made_at] += num_bytes
        if last_use[value] > made_at:
            crossing_change[made_at] += num_bytes
            crossing_change[min(last_use[value], end + 1)] -= num_bytes
            crossers.append((made_at, last_use[value], value))
    crossing_bytes = list(accumulate(crossing_change))[: end + 1]
    saved_until: Bytes = np.cumsum(saved_bytes)
    # The least that is taken by any end of a segment from there on: it never falls, and so can be searched.
    taken_until = np.minimum.accumulate((saved_until - _more_room(step, end))[::-1])[::-1]
    everything = set(step.plannable)
    room_bytes = float(saved_until[-1]) if end >= 0 else 0.0
    seen: set[tuple[int, ...]] = set()
    for _ in range(_MOST_ROOMS):
        room_bytes *= _ROOM_RATIO
        borders = _borders(room_bytes, saved_until, taken_until, crossing_bytes)
        if borders not in seen:
            seen.add(borders)
            held = {value for made_at, used_at, value in crossers if _is_crossed(borders, made_at, used_at)}
            yield held, everything - held


def _more_room(step: Step, end: int) -> Bytes:
    """Return how much less than at most there is beside activations when the backward pass comes to each op."""
    change: Bytes = np.zeros(step.num_ops + 2, dtype=np.int64)
    plannable = set(step.plannable)
    for storage, start in enumerate(step.storage_start):
        if 0 <= start < NEVER and plannable.isdisjoint(step.values_of_storage[storage]):
            change[start] += step.storage_bytes[storage]
            change[
                max(
                    step.natural_end_of_storage[storage],
                    *(step.last_release_of_value[v] for v in step.values_of_storage[storage]),
                )
                + 1
            ] -= step.storage_bytes[storage]
    beside = np.cumsum(change)[: step.num_ops]
    reached_at: Bytes = np.full(end + 1, NEVER, dtype=np.int64)
    for value in step.plannable:
        rank = step.read_rank_of_value[value]
        if rank < NEVER:
            made_at = step.value_op[value]
            reached_at[made_at] = min(reached_at[made_at], step.read_times[rank])
    # Ops whose values are not read are passed on the way from one to the other.
    is_read = reached_at < NEVER
    if not is_read.any():
        return np.zeros(end + 1, dtype=np.int64)
    nearest = np.maximum(np.maximum.accumulate(np.where(is_read, np.arange(end + 1), -1)), int(is_read.argmax()))
    there = beside[reached_at[nearest]]
    more_room: Bytes = there.max() - there
    return more_room


def _borders(room_bytes: float, saved_until: Bytes, taken_until: Bytes, crossing_bytes: list[int]) -> tuple[int, ...]:
    """Return after which ops to hold what crosses, such that held and replayed stay within the room where they can."""
    borders: list[int] = []
    start, held_bytes, end = 0, 0, len(saved_until) - 1
    while start < end:
        saved_before = int(saved_until[start - 1]) if start else 0
        fits_until = int(np.searchsorted(taken_until, saved_before + room_bytes - held_bytes, side="right")) - 1
        furthest = max(start, fits_until)
        if furthest >= end:
            break
        # Anywhere in the second half of what fits will do: where the least crosses.
        border = min(range(start + (furthest - start) // 2, furthest + 1), key=lambda i: (crossing_bytes[i], -i))
        borders.append(border)
        held_bytes += crossing_bytes[border]
        start = border + 1
    return tuple(borders)


def _is_crossed(borders: tuple[int, ...], made_at: int, used_at: int) -> bool:
    """Return whether a border lies at or after where it is made and before where it is last used."""
    position = bisect_right(borders, made_at - 1)
    return position < len(borders) and borders[position] < used_at


def _last_forward_use(step: Step) -> list[int]:
    last_use = [-1] * len(step.value_op)
    for index, op in enumerate(step.profile.ops):
        if op.phase is Phase.FORWARD:
            for value in op.inputs:
                last_use[value] = index
    return last_use
