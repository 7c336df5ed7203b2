"""Small steps exactly: every choice that could matter, judged one by one."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.planning.step import Step

MOST_ENUMERATED_VALUES = 14
"""Up to this many values whose recomputation can matter, plans are exact."""


def values_that_matter(step: Step, may_be_recomputed: frozenset[int]) -> list[int]:
    """Return the values that autograd saves, and those from which such values can be made again, in step order."""
    stack = [value for value in may_be_recomputed if step.saves_of_value[value]]
    found = set(stack)
    while stack:
        for read in step.op_inputs[step.value_op[stack.pop()]]:
            if read in may_be_recomputed and read not in found:
                found.add(read)
                stack.append(read)
    return sorted(found)


def all_choices(step: Step, values: list[int]) -> Iterator[set[int]]:
    """Yield each set of ``values`` to recompute that no smaller set equals.

    A value that autograd does not save is recomputed only for the sake of a recipe that starts from it. Without one,
    dropping it does nothing but keep what it was made from, so such sets are left out.
    """
    readers: dict[int, list[int]] = {value: [] for value in values}
    for later in values:
        for read in step.op_inputs[step.value_op[later]]:
            if read in readers:
                readers[read].append(later)

    def extended(position: int, chosen: set[int]) -> Iterator[set[int]]:
        if position < 0:
            yield set(chosen)
            return
        value = values[position]
        yield from extended(position - 1, chosen)
        if step.saves_of_value[value] or any(reader in chosen for reader in readers[value]):
            chosen.add(value)
            yield from extended(position - 1, chosen)
            chosen.discard(value)

    yield from extended(len(values) - 1, set())
