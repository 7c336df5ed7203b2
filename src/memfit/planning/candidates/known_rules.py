"""What others would do with a step: the layer strategies and torch's selective rules, as sets of values to recompute.

A plan for a budget is never slower than any of these at the memory that they reach, because they are among the plans
that it is chosen from.
"""

from __future__ import annotations

from collections.abc import Iterator

from memfit.layers.strategies import (
    AttentionOnly,
    EveryNthLayer,
    FfnOnly,
    Full,
    LargestLayers,
    LayerStrategy,
    Selective,
    SqrtLayers,
)
from memfit.planning.candidates.pool import Pool
from memfit.planning.step import Step
from memfit.planning.step.block_values import BlockValues

# All sizes of a strategy are tried up to this many blocks, this many sizes beyond.
_MOST_SIZES = 16

_NUMS_OF_FIRST_BLOCKS = (1, 2, 4, 8)

_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "_scaled_mm", "_grouped_mm")


def known_rules(pool: Pool) -> Iterator[set[int]]:
    """Yield what each rule recomputes.

    They make plans faster by less than 0.01 points on average, and a plan never slower than any of these rules.
    """
    step = pool.step
    num_blocks = len(step.profile.blocks)
    if not num_blocks:
        return
    blocks = BlockValues(step)
    layers = step.profile.layers
    # Ranges of blocks overlap a lot; one look at each block is enough.
    inside = [blocks.inside([number]) for number in range(num_blocks)]
    for strategy in _strategies(num_blocks):
        yield set().union(*(inside[number] for number in strategy.choose(layers).dropped_positions))
    for size in _sizes(num_blocks):
        yield set().union(*inside[:size])
    everything = set().union(*inside)
    matmuls = [value for value in sorted(everything) if _is_matmul(step, value)]
    attention = {value for value in everything if "attention" in _op_name(step, value)}
    yield everything - attention
    yield everything - attention - set(matmuls)
    yield everything - attention - set(matmuls[::2])
    yield everything - attention - set(matmuls[1::2])
    yield everything | blocks.leaving()


def whole_blocks(step: Step) -> Iterator[set[int]]:
    """Yield what is recomputed where every block is replayed from what enters it, and where attention is spared.

    Also where the first blocks are not replayed: when the backward pass comes to them, the gradients of all others are
    there, and replays have the least room.
    """
    blocks, num_blocks = BlockValues(step), len(step.profile.blocks)
    everything = blocks.inside(range(num_blocks))
    if everything:
        yield everything
        yield {value for value in everything if "attention" not in _op_name(step, value)}
    for num_first in _NUMS_OF_FIRST_BLOCKS:
        if num_first < num_blocks:
            yield blocks.inside(range(num_first, num_blocks))


def _strategies(num_blocks: int) -> Iterator[LayerStrategy]:
    yield from (Full(), AttentionOnly(), FfnOnly(), SqrtLayers())
    for size in _sizes(num_blocks):
        yield LargestLayers(size)
        yield Selective(size / num_blocks)
        yield EveryNthLayer(size)


def _sizes(num_blocks: int) -> list[int]:
    if num_blocks <= _MOST_SIZES:
        return list(range(1, num_blocks + 1))
    return sorted({2, 3, 4, *(num_blocks * part // _MOST_SIZES for part in range(1, _MOST_SIZES))})


def _op_name(step: Step, value: int) -> str:
    return step.profile.ops[step.value_op[value]].op.rpartition(".")[2]


def _is_matmul(step: Step, value: int) -> bool:
    return _op_name(step, value) in _MATMULS
