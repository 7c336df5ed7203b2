"""Densify the frontier: plans between two neighbours that are far apart.

A budget between the two would get the smaller one, and leave memory unused. What only that one recomputes is saved in
part: the most expensive for its size first, or what was made first, or last. `slack` then uses what room is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from memfit.planning.candidates.pool import Candidate, Pool
from memfit.planning.step import Step

# How many plans a step of one op could pay for, and how many there are at most.
_EFFORT_OPS, _MOST_TRIES = 1_400_000, 1_800
_NUM_ROUNDS, _NUM_PARTS = 3, 4
_TRIES_PER_GAP = 3 * (_NUM_PARTS - 1)
# Two plans that are no further apart than this part of the frontier's range are close enough.
_CLOSE = 256


def densify(pool: Pool) -> Iterator[frozenset[int]]:
    """Yield plans where the frontier has gaps, the gaps that cost the most first.

    Leaving this out costs 0.1 points of overhead on average, and up to 0.2 (`benchmarks/ablation.py`).
    """
    num_gaps = min(_EFFORT_OPS // max(pool.step.num_ops, 1), _MOST_TRIES) // (_NUM_ROUNDS * _TRIES_PER_GAP)
    for _ in range(_NUM_ROUNDS):
        for larger, smaller in _gaps(pool.frontier())[:num_gaps]:
            yield from _between(pool.step, larger, smaller)


def _gaps(frontier: list[Candidate]) -> list[tuple[Candidate, Candidate]]:
    """Return the plans around each gap, largest first: by how much time is lost on average in how much memory."""
    close_bytes = (frontier[0].peak_bytes - frontier[-1].peak_bytes) // _CLOSE

    def size(gap: tuple[Candidate, Candidate]) -> float:
        larger, smaller = gap
        return (larger.peak_bytes - smaller.peak_bytes) * (smaller.added_seconds - larger.added_seconds)

    wide = [gap for gap in pairwise(frontier) if gap[0].peak_bytes - gap[1].peak_bytes > close_bytes]
    return sorted(wide, key=size, reverse=True)


def _between(step: Step, larger: Candidate, smaller: Candidate) -> Iterator[frozenset[int]]:
    def seconds_per_byte(value: int) -> float:
        return step.replay_seconds[step.value_op[value]] / max(step.value_bytes[value], 1)

    in_order = sorted(smaller.recomputed - larger.recomputed)
    most_expensive_first = sorted(in_order, key=seconds_per_byte, reverse=True)
    for part in range(1, _NUM_PARTS):
        num_values = len(in_order) * part // _NUM_PARTS
        yield smaller.recomputed.difference(most_expensive_first[:num_values])
        yield larger.recomputed.union(in_order[:num_values])
        yield larger.recomputed.union(in_order[num_values:])
