"""Plans for the lowest budgets of models with blocks: hold what leaves some of the blocks, recompute all the rest.

Which blocks those should be depends on more than their sizes: gradients pile up while the backward pass frees what the
forward pass held, so that the peak may be at either end of it. So holding what leaves every n-th block is where the
search begins, for larger and larger n, and then for those around the best. From there it goes on by one block at a
time, as long as the peak comes down and the effort lasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from memfit.planning.step import Step
from memfit.planning.step.block_values import BlockValues

# How many plans a step of one op could pay for, beyond those that hold every n-th block.
_EFFORT_OPS = 100_000
# How much larger each n is than the one before, and after how many in a row that bring nothing it ends.
_GROWTH, _MOST_IN_VAIN = 1.25, 2


def bordered_choices(step: Step, peak_bytes_of: Callable[[set[int]], int]) -> Iterator[tuple[set[int], set[int]]]:
    """Yield what to hold at the borders and what to recompute between them; the peak of each tells where to go on."""
    num_blocks = len(step.profile.blocks)
    if num_blocks < 2:
        return
    blocks = BlockValues(step)
    leaving = [blocks.leaving_from(number) for number in range(num_blocks)]
    everything = set(step.plannable)

    def choice(held_blocks: frozenset[int]) -> tuple[set[int], set[int]]:
        held = set[int]().union(*(leaving[number] for number in held_blocks))
        return held, everything - held

    peaks: dict[frozenset[int], int] = {}

    def peak_of(held_blocks: frozenset[int]) -> int:
        if held_blocks not in peaks:
            peaks[held_blocks] = peak_bytes_of(choice(held_blocks)[1])
        return peaks[held_blocks]

    best = _every_nth(num_blocks, peak_of)
    number, num_in_vain = 0, 0
    num_left = _EFFORT_OPS // max(step.num_ops, 1) - len(peaks)
    while num_left > 0 and num_in_vain < num_blocks:
        held_blocks = best ^ {number % num_blocks}
        number, num_left, num_in_vain = number + 1, num_left - 1, num_in_vain + 1
        if peak_of(held_blocks) < peak_of(best):
            best, num_in_vain = held_blocks, 0
    yield from map(choice, peaks)


def _every_nth(num_blocks: int, peak_of: Callable[[frozenset[int]], int]) -> frozenset[int]:
    """Return the best of those that hold what leaves every n-th block, the last one's always."""

    def held_blocks(distance: int) -> frozenset[int]:
        return frozenset(range(num_blocks - 1, -1, -distance))

    best, distance, num_in_vain = 1, 1, 0
    while distance <= num_blocks // 2 and num_in_vain < _MOST_IN_VAIN:
        is_better = peak_of(held_blocks(distance)) < peak_of(held_blocks(best))
        best, num_in_vain = (distance, 0) if is_better else (best, num_in_vain + (distance > 1))
        distance = math.ceil(distance * _GROWTH)
    reach = int(best * (_GROWTH - 1))
    while reach:
        near = [distance for distance in (best - reach, best + reach) if distance >= 1]
        best = min([best, *near], key=lambda distance: peak_of(held_blocks(distance)))
        reach //= 2
    return held_blocks(best)
