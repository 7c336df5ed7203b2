"""Which values lie inside which block of the model: what layer strategies and checkpointing rules choose from."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from memfit.graph.model_profile import Phase
from memfit.graph.names import path_and_ancestors
from memfit.planning.step import Step

# Outputs this many times smaller than the largest output of their op (means, log-sum-exps) are not worth a replay.
STATISTICS_RATIO = 8


class BlockValues:
    """The values made in each block of a step, and those of them that leave it."""

    def __init__(self, step: Step) -> None:
        self._step = step
        ops = step.profile.ops
        number_of_path = {block.path: number for number, block in enumerate(step.profile.blocks)}

        @cache
        def blocks_of(module: str | None) -> frozenset[int]:
            paths = () if module is None else path_and_ancestors(module)
            return frozenset(number_of_path[path] for path in paths if path in number_of_path)

        self._made: list[list[int]] = [[] for _ in step.profile.blocks]
        self._leaving: list[set[int]] = [set() for _ in step.profile.blocks]
        blocks_of_value: dict[int, frozenset[int]] = {}
        for value in step.plannable:
            blocks_of_value[value] = blocks_of(ops[step.value_op[value]].module)
            for number in blocks_of_value[value]:
                self._made[number].append(value)
        for op in ops:
            # The backward pass reads what autograd saved, wherever it was made, so that only the forward pass counts.
            if op.phase is Phase.FORWARD:
                here = blocks_of(op.module)
                for value in op.inputs:
                    for number in blocks_of_value.get(value, frozenset()) - here:
                        self._leaving[number].add(value)

    def made_in(self, numbers: Iterable[int]) -> set[int]:
        """Return the values made inside these blocks, wherever they are used."""
        return {value for number in numbers for value in self._made[number]}

    def inside(self, numbers: Iterable[int]) -> set[int]:
        """Return the values made and used inside these blocks only, without statistics.

        What leaves a block is what the next one starts from.
        """
        return {
            value
            for number in numbers
            for value in self._made[number]
            if value not in self._leaving[number] and not is_statistic(self._step, value)
        }

    def leaving(self) -> set[int]:
        """Return the values that leave the block in which they were made."""
        return set().union(*self._leaving)


def is_statistic(step: Step, value: int) -> bool:
    """Return whether the value is one of the small ones that an op returns beside its result."""
    outputs = step.op_outputs[step.value_op[value]]
    return step.value_bytes[value] * STATISTICS_RATIO <= max(step.value_bytes[output] for output in outputs)
