"""Plans for the lowest budgets of models with blocks: hold what leaves some of the blocks, recompute all the rest.

Which blocks those should be depends on more than their sizes: gradients pile up while the backward pass frees what the
forward pass held, so that the peak may be at either end of it. So holding what leaves every n-th block is where the
search begins, and from the best of these it goes on by one block at a time, as long as the peak comes down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memfit.planning.block_values import BlockValues
from memfit.planning.step import Step

# How many plans a step of one op could pay for.
_EFFORT_OPS = 100_000


def bordered_choices(step: Step, peak_bytes_of: Callable[[set[int]], int]) -> Iterator[tuple[set[int], set[int]]]:
    """Yield what to hold at the borders and what to recompute between them; the peak of each tells where to go on."""
    num_blocks = len(step.profile.blocks)
    num_left = _EFFORT_OPS // max(step.num_ops, 1)
    if num_blocks < 2 or num_left < num_blocks:
        return
    blocks = BlockValues(step)
    leaving = [blocks.leaving_from(number) for number in range(num_blocks)]
    everything = set(step.plannable)

    def choice(held_blocks: frozenset[int]) -> tuple[set[int], set[int]]:
        held = set[int]().union(*(leaving[number] for number in held_blocks))
        return held, everything - held

    best: tuple[int, frozenset[int]] | None = None
    for distance in range(1, num_blocks // 2 + 1):
        held_blocks = frozenset(range(num_blocks - 1, -1, -distance))
        yield choice(held_blocks)
        peak_bytes = peak_bytes_of(choice(held_blocks)[1])
        num_left -= 1
        if best is not None and peak_bytes >= best[0]:
            break
        best = peak_bytes, held_blocks
    assert best is not None
    number, num_in_vain = 0, 0
    while num_left > 0 and num_in_vain < num_blocks:
        held_blocks = best[1] ^ {number % num_blocks}
        yield choice(held_blocks)
        peak_bytes = peak_bytes_of(choice(held_blocks)[1])
        num_left -= 1
        number, num_in_vain = number + 1, num_in_vain + 1
        if peak_bytes < best[0]:
            best, num_in_vain = (peak_bytes, held_blocks), 0
