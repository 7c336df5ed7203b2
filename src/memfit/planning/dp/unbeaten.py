"""Of rows of numbers, those that no other is at least as good as everywhere: Pareto's choice."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# How many rows are compared with those known to be good at a time.
_NUM_COMPARED = 256


def unbeaten(criteria: Numbers) -> Ints:
    """Return the rows that no other is at most as large as in all columns; of equal ones, the first."""
    low, high = criteria.min(axis=0), criteria.max(axis=0)
    # A row that beats another has the smaller sum.
    order: Ints = np.argsort(((criteria - low) / np.maximum(high - low, 1e-300)).sum(axis=1), kind="stable")
    columns = np.ascontiguousarray(criteria[order].T)
    kept: Ints = np.zeros(0, dtype=np.int64)
    for start in range(0, len(order), _NUM_COMPARED):
        which = np.arange(start, min(start + _NUM_COMPARED, len(order)))
        which = which[~_is_as_good(columns[:, kept], columns[:, which]).any(axis=0)]
        is_as_good = _is_as_good(columns[:, which], columns[:, which])
        is_beaten = np.any(is_as_good & (~is_as_good.T | np.triu(is_as_good, 1)), axis=0)
        kept = np.concatenate([kept, which[~is_beaten]])
    return order[kept]


def _is_as_good(good: Numbers, others: Numbers) -> Flags:
    """Return, by pairs, whether the first is at most the other in all columns."""
    is_as_good = np.ones((good.shape[1], others.shape[1]), dtype=bool)
    for mine, other in zip(good, others, strict=True):
        is_as_good &= mine[:, None] <= other[None]
    return is_as_good
