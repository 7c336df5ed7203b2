"""Launch-aware pruning, for steps in which the device waits for the host.

There, a small value costs as much to drop and to restore as a large one. So each plan is tried without the smallest
values that it recomputes, and without those of some blocks. Between two neighbours on the frontier lie plans that
recompute what the larger one does and a part of what the smaller one does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from memfit.planning.candidates.pool import Candidate, Pool, spread
from memfit.planning.step.block_values import BlockValues

# How many plans a step of one op could pay for, and how many are pruned at most.
_EFFORT_OPS, _MOST_PLANS = 830_000, 17
_NUM_PARTS = 8
_TRIES_PER_PLAN = 5 * (_NUM_PARTS - 1)


def prune_launches(pool: Pool) -> Iterator[frozenset[int]]:
    """Yield plans that launch less than the candidates do.

    Leaving this out costs 1 to 6 points on launch-bound steps, and nothing on others (`benchmarks/ablation.py`).
    """
    step = pool.step
    num_plans = min(_EFFORT_OPS // max(step.num_ops, 1) // _TRIES_PER_PLAN, _MOST_PLANS)
    if not step.time.launches_may_matter or num_plans < 2:
        return
    pruning = _Pruning(pool)
    for plan in spread(pool.frontier(), num_plans):
        yield from pruning.without_parts(plan)
    for larger, smaller in pairwise(spread(pool.frontier(), num_plans)):
        yield from pruning.between(larger, smaller)


class _Pruning:
    def __init__(self, pool: Pool) -> None:
        self._step = pool.step
        blocks, num_blocks = BlockValues(pool.step), len(pool.step.profile.blocks)
        nums_first = [num_blocks * k // _NUM_PARTS for k in range(1, _NUM_PARTS)]
        self._in_first_blocks = [blocks.made_in(range(num_first)) for num_first in nums_first]
        self._in_blocks = blocks.made_in(range(num_blocks))

    def without_parts(self, plan: Candidate) -> Iterator[frozenset[int]]:
        """Yield the plan without its smallest values, and in the first or the last blocks only."""
        smallest_first = self._smallest_first(plan.recomputed)
        for part, in_first in enumerate(self._in_first_blocks, 1):
            yield plan.recomputed.difference(smallest_first[: len(smallest_first) * part // _NUM_PARTS])
            yield plan.recomputed - in_first
            yield plan.recomputed - (self._in_blocks - in_first)

    def between(self, larger: Candidate, smaller: Candidate) -> Iterator[frozenset[int]]:
        """Yield plans that recompute a part of what only the smaller plan does: its largest values, or its first."""
        largest_first = self._smallest_first(smaller.recomputed - larger.recomputed)[::-1]
        for values in (largest_first, sorted(largest_first)):
            for part in range(1, _NUM_PARTS):
                yield larger.recomputed.union(values[: len(values) * part // _NUM_PARTS])

    def _smallest_first(self, values: frozenset[int]) -> list[int]:
        return sorted(values, key=lambda value: (self._step.value_bytes[value], value))
