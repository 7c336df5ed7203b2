"""Small steps exactly: every choice that could matter is tried."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.planning.candidates.pool import Pool

MOST_ENUMERATED_VALUES = 14
"""Up to this many values whose recomputation can matter, plans are exact."""


def values_that_matter(pool: Pool) -> list[int]:
    """Return the values that autograd saves, and those from which such values can be made again, in step order."""
    step = pool.step
    stack = [value for value in pool.may_be_recomputed if step.saves_of_value[value]]
    found = set(stack)
    while stack:
        for read in step.op_inputs[step.value_op[stack.pop()]]:
            if read in pool.may_be_recomputed and read not in found:
                found.add(read)
                stack.append(read)
    return sorted(found)


def all_choices(pool: Pool) -> Iterator[set[int]]:
    """Yield each set of values to recompute that no smaller set equals.

    A value that autograd does not save is recomputed only for the sake of a replay that starts from it. Without one,
    dropping it does nothing but keep what it was made from, so such sets are left out.
    """
    step = pool.step
    # For each set so far, what its replays start from. Later values come first.
    chosen: list[tuple[set[int], set[int]]] = [(set(), set())]
    for value in reversed(values_that_matter(pool)):
        inputs = step.op_inputs[step.value_op[value]]
        chosen += [
            (recomputed | {value}, read.union(inputs))
            for recomputed, read in chosen
            if step.saves_of_value[value] or value in read
        ]
    yield from (recomputed for recomputed, _ in chosen)
