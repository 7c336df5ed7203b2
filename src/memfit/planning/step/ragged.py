"""Rows of different lengths as one flat array, so that NumPy can look up many rows in one call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Ragged:
    """Rows of integers: the inputs of each op, for example."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths: Ints = np.array([len(row) for row in rows], dtype=np.int64)
        self.items: Ints = np.array(list(chain.from_iterable(rows)), dtype=np.int64)
        self.starts: Ints = np.cumsum(self.lengths) - self.lengths

    def of(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the items of the given rows, and for each item the place of its row among those given."""
        lengths = self.lengths[rows]
        ends = np.cumsum(lengths)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        return self.items[np.repeat(self.starts[rows], lengths) + within], np.repeat(np.arange(len(rows)), lengths)
