"""Whatever is given, nothing but memfit's own errors comes out, and they say what was given and what is allowed."""

from __future__ import annotations

import contextlib
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit import (
    Budget,
    EveryNthLayer,
    Full,
    InvalidParameterError,
    LargestLayers,
    LayerMemoryProfile,
    LayerTypeHint,
    MemfitError,
    Selective,
    SqrtLayers,
    activation_stats,
    build_checkpoint_plan,
)

OTHER = LayerTypeHint.OTHER

# Everything a caller might pass by mistake.
anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.fractions(),
    st.decimals(),
    st.complex_numbers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.integers(), st.integers(), max_size=2),
    st.just(object()),
    st.sampled_from([np.int64(3), np.uint8(2), np.float32(0.5), np.bool_(True), np.array([1]), np.array(2), np.nan]),
    st.sampled_from([*LayerTypeHint, LayerTypeHint, Full, Full(), "Attention"]),
)


@given(anything, anything, anything, anything, anything)
def test_a_profile_is_whole_numbers_or_a_memfit_error(
    layer_idx: object, layer_type: object, size_bytes: object, flops: object, name: object
) -> None:
    try:
        layer = LayerMemoryProfile(layer_idx, layer_type, size_bytes, flops, name)  # type: ignore[arg-type]
    except MemfitError:
        return
    for number in (layer.layer_idx, layer.activation_size_bytes, layer.recompute_flops):
        assert type(number) is int
        assert 0 <= number < 2**64


@settings(max_examples=300)
@given(
    profiles=st.one_of(
        anything,
        st.lists(
            st.one_of(
                anything,
                st.builds(LayerMemoryProfile, st.integers(0, 9), st.just(OTHER), st.integers(0, 9), st.integers(0, 9)),
            ),
            max_size=4,
        ),
    ),
    strategy=st.one_of(
        anything,
        st.builds(Selective, anything),
        st.builds(EveryNthLayer, anything),
        st.builds(LargestLayers, anything),
        st.builds(Budget, anything),
        st.just(SqrtLayers()),
    ),
)
def test_planning_anything_gives_a_plan_or_a_memfit_error(profiles: object, strategy: object) -> None:
    with contextlib.suppress(MemfitError):
        plan = build_checkpoint_plan(profiles, strategy)  # type: ignore[arg-type]
        activation_stats(profiles, plan)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((-1, OTHER, 0, 0), r"layer_idx must be a whole number, at least 0; got -1"),
        ((True, OTHER, 0, 0), r"layer_idx must be .* got True \(bool\)"),
        ((0, "Attention", 0, 0), r"layer_type must be one of LayerTypeHint\.ATTENTION.* got 'Attention' \(str\)"),
        ((0, None, 0, 0), r"layer_type must be .* got None"),
        ((0, OTHER, -5, 0), r"activation_size_bytes must be .* got -5"),
        ((0, OTHER, 1.5, 0), r"activation_size_bytes must be .* got 1\.5 \(float\)"),
        ((0, OTHER, float("nan"), 0), r"activation_size_bytes must be .* got nan \(float\)"),
        (
            (0, OTHER, 2**64, 0),
            r"activation_size_bytes must be a whole number, at most 18446744073709551615; got 18446744073709551616",
        ),
        ((0, OTHER, 0, None), r"recompute_flops must be .* got None"),
        ((0, OTHER, 0, "12"), r"recompute_flops must be .* got '12' \(str\)"),
        ((0, OTHER, 0, np.bool_(True)), r"recompute_flops must be .* got np\.True_"),
        ((0, OTHER, 0, 0, 5), r"name must be a string or None; got 5"),
    ],
)
def test_a_profile_says_which_field_is_wrong(fields: tuple[object, ...], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        LayerMemoryProfile(*fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Selective(1.5), r"checkpoint_ratio must be a number from 0 to 1.* got 1\.5"),
        (Selective(-0.1), r"checkpoint_ratio .* got -0\.1"),
        (Selective(float("nan")), "checkpoint_ratio .* got NaN"),
        (Selective(float("inf")), "checkpoint_ratio .* got inf"),
        (Selective(None), "checkpoint_ratio .* got None"),  # type: ignore[arg-type]
        (Selective("0.5"), "checkpoint_ratio .* got '0.5'"),  # type: ignore[arg-type]
        (Selective(True), "checkpoint_ratio .* got True"),
        (Selective(np.True_), r"checkpoint_ratio .* got np\.True_"),  # type: ignore[arg-type]
        (EveryNthLayer(0), r"n of EveryNthLayer must be a whole number, at least 1; got 0"),
        (EveryNthLayer(-2), r"n of EveryNthLayer .* got -2"),
        (EveryNthLayer(2.0), r"n of EveryNthLayer .* got 2\.0 \(float\)"),  # type: ignore[arg-type]
        (LargestLayers(-1), "top_k .* got -1"),
        (LargestLayers(True), r"top_k .* got True \(bool\)"),
        (Budget(-1), "max_memory_mb must be a number of MiB, at least 0; got -1"),
        (Budget(np.True_), r"max_memory_mb .* got np\.True_"),  # type: ignore[arg-type]
        (Budget(True), "max_memory_mb .* got True"),
        (Budget(float("nan")), "max_memory_mb .* got NaN"),
        (Budget("2GiB"), "max_memory_mb .* got '2GiB'"),  # type: ignore[arg-type]
        (Budget(-float("inf")), "max_memory_mb .* got -inf"),
        (Full, r"strategy must be a strategy object such as Full\(\)"),
        (None, r"strategy must be .* got None"),
        ("full", r"strategy must be .* got 'full'"),
    ],
)
@pytest.mark.parametrize("profiles", [[], [LayerMemoryProfile(0, OTHER, 1, 1)]])
def test_a_strategy_says_what_is_wrong_also_for_an_empty_list(
    profiles: list[LayerMemoryProfile], strategy: Selective, message: str
) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        build_checkpoint_plan(profiles, strategy)


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        (None, r"profiles must be a list of LayerMemoryProfile.* got None"),
        ("layers", r"profiles must be .* got 'layers'"),
        (LayerMemoryProfile(0, OTHER, 1, 1), r"profiles must be a list"),
        ([None], r"profiles\[0\] must be a LayerMemoryProfile; got None"),
        ([(0, OTHER, 1, 1)], r"profiles\[0\] must be a LayerMemoryProfile"),
        (
            [
                LayerMemoryProfile(4, OTHER, 1, 1),
                LayerMemoryProfile(5, OTHER, 1, 1),
                LayerMemoryProfile(4, OTHER, 2, 2),
            ],
            r"layer_idx 4 is given twice, in profiles\[0\] and profiles\[2\]",
        ),
    ],
)
def test_profiles_say_what_is_wrong(profiles: list[LayerMemoryProfile], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        build_checkpoint_plan(profiles, Full())


def test_integers_of_numpy_become_pythons() -> None:
    layer = LayerMemoryProfile(np.int32(3), OTHER, np.uint64(2**63), np.int64(7))  # type: ignore[arg-type]
    assert (layer.layer_idx, layer.activation_size_bytes, layer.recompute_flops) == (3, 2**63, 7)
    assert type(layer.activation_size_bytes) is int
    plan = build_checkpoint_plan([layer], EveryNthLayer(np.int64(1)))  # type: ignore[arg-type]
    assert plan.checkpointed_layers == (3,)


@pytest.mark.parametrize("ratio", [Fraction(1, 2), np.float64(0.5), np.float32(0.5), Decimal("0.5")])
def test_a_ratio_may_be_any_real_number(ratio: float) -> None:
    layers = [LayerMemoryProfile(i, OTHER, 1, 1) for i in range(4)]
    assert build_checkpoint_plan(layers, Selective(ratio)).checkpointed_layers == (0, 2)


def test_a_profile_is_frozen() -> None:
    with pytest.raises(AttributeError):
        LayerMemoryProfile(0, OTHER, 1, 1).layer_idx = 5  # type: ignore[misc]


def test_layer_types_print_as_files_and_tables_write_them() -> None:
    assert [str(hint) for hint in LayerTypeHint] == ["Attention", "FFN", "Embedding", "Norm", "Other"]
