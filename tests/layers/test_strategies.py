"""Which layers each strategy drops, by exact positions on lists small enough to check by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit import (
    EveryNthLayer,
    LargestLayers,
    LayerMemoryProfile,
    LayerTypeHint,
    Selective,
    SqrtLayers,
    build_checkpoint_plan,
)
from memfit.layers.strategies import Choice, LayerStrategy


def layers_of(sizes_bytes: list[int]) -> list[LayerMemoryProfile]:
    return [LayerMemoryProfile(i, LayerTypeHint.OTHER, size, 1) for i, size in enumerate(sizes_bytes)]


def dropped(strategy: LayerStrategy, sizes_bytes: list[int]) -> tuple[int, ...]:
    return build_checkpoint_plan(layers_of(sizes_bytes), strategy).checkpointed_layers


@pytest.mark.parametrize(
    ("num_layers", "ratio", "positions"),
    [
        (8, 0.625, (0, 2, 4, 5, 7)),  # the original dropped four here
        (6, 0.5, (0, 2, 4)),
        (10, 0.3, (0, 3, 6)),
        (5, 0.3, (0, 3)),  # 1.5 layers, rounded away from zero
        (13, 0.15, (0, 7)),
        (4, 0.1, ()),
        (4, 0.125, (0,)),  # half a layer, rounded away from zero
        (3, 1.0, (0, 1, 2)),
        (3, 0, ()),
    ],
)
def test_selective_drops_its_exact_count_at_these_positions(
    num_layers: int, ratio: float, positions: tuple[int, ...]
) -> None:
    assert dropped(Selective(ratio), [1] * num_layers) == positions


@given(num_layers=st.integers(1, 200), ratio=st.floats(0, 1))
def test_selective_is_evenly_spread_from_the_first_layer(num_layers: int, ratio: float) -> None:
    positions = dropped(Selective(ratio), [1] * num_layers)
    product = ratio * num_layers
    expected = math.floor(product) + (product % 1 >= 0.5)
    assert len(positions) == expected
    if positions:
        assert positions[0] == 0
        distances = [after - before for before, after in pairwise(positions)]
        assert set(distances) <= {num_layers // expected, -(-num_layers // expected)}


@pytest.mark.parametrize(("n", "positions"), [(1, (0, 1, 2, 3, 4)), (2, (0, 2, 4)), (5, (0,)), (2**64 - 1, (0,))])
def test_every_nth_layer_drops_by_position(n: int, positions: tuple[int, ...]) -> None:
    assert dropped(EveryNthLayer(n), [1] * 5) == positions


def test_every_nth_layer_goes_by_position_and_not_by_layer_idx() -> None:
    layers = [LayerMemoryProfile(i, LayerTypeHint.OTHER, 1, 1) for i in (9, 4, 7, 2)]
    plan = build_checkpoint_plan(layers, EveryNthLayer(2))
    assert plan.checkpointed_layers == (9, 7)
    assert plan.saved_layers == (4, 2)


@pytest.mark.parametrize(("top_k", "positions"), [(0, ()), (1, (1,)), (2, (1, 3)), (3, (0, 1, 3)), (99, (0, 1, 2, 3))])
def test_largest_layers_go_first_and_ties_to_the_earlier(top_k: int, positions: tuple[int, ...]) -> None:
    assert dropped(LargestLayers(top_k), [5, 9, 5, 9]) == positions


def boundaries(sizes_bytes: list[int]) -> tuple[int, ...]:
    return build_checkpoint_plan(layers_of(sizes_bytes), SqrtLayers()).saved_layers


def test_sixteen_equal_layers_make_four_segments_of_four() -> None:
    assert boundaries([7] * 16) == (3, 7, 11, 15)
    assert dropped(SqrtLayers(), [7] * 16) == (0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14)


@pytest.mark.parametrize(
    ("sizes_bytes", "saved"),
    [
        ([], ()),
        ([3], (0,)),
        ([3, 3], (1,)),  # √2 is nearer to one segment
        ([3, 3, 3], (1, 2)),  # two segments of 4.5 bytes: six reach the first cut
        ([1] * 10, (3, 6, 9)),
        ([8, 1, 1, 1, 1, 1, 1, 1, 1], (0, 3, 8)),  # cuts at 16/3, 32/3 and 16
        ([1, 1, 1, 97], (3,)),  # one layer reaches both cuts
        ([0, 0, 0, 0], (1, 3)),  # no bytes: each layer counts as one
        ([4, 4, 4, 4, 0], (1, 3)),  # a layer without bytes reaches nothing
    ],
)
def test_segments_hold_about_equal_bytes(sizes_bytes: list[int], saved: tuple[int, ...]) -> None:
    assert boundaries(sizes_bytes) == saved


@given(st.lists(st.integers(0, 10**18), min_size=1, max_size=60))
def test_a_segment_stays_short_of_one_share_until_its_boundary(sizes_bytes: list[int]) -> None:
    num_segments = round(math.sqrt(len(sizes_bytes)))
    saved = boundaries(sizes_bytes)
    assert 1 <= len(saved) <= num_segments
    total = sum(sizes_bytes)
    starts = [0, *(position + 1 for position in saved)]
    for start, end in zip(starts, saved, strict=False):
        # What is dropped between two boundaries never reaches a whole share of the bytes.
        assert sum(sizes_bytes[start:end]) * num_segments < total or total == 0


def test_users_bring_their_own_strategy() -> None:
    class LastLayer(LayerStrategy):
        def choose(self, profiles: object) -> Choice:
            return Choice([2])

    assert dropped(LastLayer(), [1, 1, 1]) == (2,)
