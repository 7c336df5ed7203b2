"""Rows that no other is as good as, against comparing each with each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memfit.planning.dp.unbeaten as module
from memfit.planning.dp.unbeaten import unbeaten


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=30), st.integers(1, 8))
def test_a_row_stays_unless_another_is_as_good_everywhere(rows: list[tuple[int, ...]], num_compared: int) -> None:
    criteria = np.array(rows, dtype=float)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_NUM_COMPARED", num_compared)
        kept = sorted(unbeaten(criteria).tolist())
    expected = [
        number
        for number, row in enumerate(rows)
        if not any(
            all(a <= b for a, b in zip(other, row, strict=True)) and (other != row or place < number)
            for place, other in enumerate(rows)
            if place != number
        )
    ]
    assert kept == expected
