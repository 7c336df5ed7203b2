"""Plans between two that follow each other on the frontier, where these are far apart.

A budget between the two would get the smaller one, and leave memory unused. What only that one recomputes is saved in
part: the dearest for its size first, or what was made first, or last. Some of these plans are better than either of
the two leads to expect; the others are at least between them. What there is still room for, `stuffing` finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise

from memfit.planning.candidates.trade_off import Candidate, TradeOff
from memfit.planning.step import Step

# How many plans a step of one op could pay for.
_EFFORT_OPS = 2_500_000
_NUM_ROUNDS = 2
_NUM_PARTS = 4
_TRIES_PER_HOLE = 3 * (_NUM_PARTS - 1)
# Two plans that are no further apart than this part of all the memory that is to be had follow closely enough.
_CLOSE = 128


def fill(trade_off: TradeOff) -> None:
    """Add plans where the frontier has holes, to those first that cost the most."""
    num_holes = _EFFORT_OPS // max(trade_off.step.num_ops, 1) // (_NUM_ROUNDS * _TRIES_PER_HOLE)
    for _ in range(_NUM_ROUNDS):
        for larger, smaller in islice(_holes(trade_off.frontier()), num_holes):
            trade_off.add_all(_between(trade_off.step, larger, smaller))


def _holes(frontier: list[Candidate]) -> Iterator[tuple[Candidate, Candidate]]:
    """Yield the plans around each hole, largest first: by how much time is lost on average in how much memory."""
    close_bytes = (frontier[0].peak_bytes - frontier[-1].peak_bytes) // _CLOSE

    def size(hole: tuple[Candidate, Candidate]) -> float:
        larger, smaller = hole
        return (larger.peak_bytes - smaller.peak_bytes) * (smaller.added_seconds - larger.added_seconds)

    for larger, smaller in sorted(pairwise(frontier), key=size, reverse=True):
        if larger.peak_bytes - smaller.peak_bytes > close_bytes:
            yield larger, smaller


def _between(step: Step, larger: Candidate, smaller: Candidate) -> Iterator[frozenset[int]]:
    def seconds_per_byte(value: int) -> float:
        return step.replay_seconds[step.value_op[value]] / max(step.value_bytes[value], 1)

    in_order = sorted(smaller.recomputed - larger.recomputed)
    dearest_first = sorted(in_order, key=seconds_per_byte, reverse=True)
    for part in range(1, _NUM_PARTS):
        num_values = len(in_order) * part // _NUM_PARTS
        yield smaller.recomputed.difference(dearest_first[:num_values])
        yield larger.recomputed.union(in_order[:num_values])
        yield larger.recomputed.union(in_order[num_values:])
