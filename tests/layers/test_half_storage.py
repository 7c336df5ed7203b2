"""16-bit storage: the promised bounds, number by number, in NumPy, in PyTorch and through the array API."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memfit.layers.checkpointing.half_storage import LARGEST, SMALLEST, hold_in_half

FLOAT32_LARGEST = float(np.finfo(np.float32).max)
FLOAT32_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
EDGES = [
    0.0,
    -0.0,
    FLOAT32_LARGEST,
    -FLOAT32_LARGEST,
    LARGEST,
    FLOAT32_SMALLEST,
    -FLOAT32_SMALLEST,
    SMALLEST,
    2.0**-134,
    2.0**-126,
    1e-40,
    0.0004,
    1.00390625,
    70000.0,
    float("inf"),
    float("-inf"),
    float("nan"),
]


def check_promise(given_values: np.ndarray[Any, Any], restored: np.ndarray[Any, Any]) -> None:
    """The bounds of the module's docstring, in float64, where they are exact for float32 and float64 values."""
    assert restored.dtype == given_values.dtype
    assert restored.shape == given_values.shape
    x, y = given_values.astype(np.float64), restored.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(x))
    np.testing.assert_array_equal(np.isfinite(y), np.isfinite(x))
    np.testing.assert_array_equal(y == 0, x == 0)
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(np.signbit(y)[numbers], np.signbit(x)[numbers])
    finite = np.isfinite(x)
    error = np.abs(y[finite] - x[finite])
    assert np.all(error <= np.maximum(2.0**-8 * np.abs(x[finite]), 2.0**-133))


float32s = st.floats(width=32)
float64s_in_range = st.floats(-FLOAT32_LARGEST, FLOAT32_LARGEST) | st.sampled_from([float("inf"), float("nan")])


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0), elements=float32s))
@example(np.array(EDGES, dtype=np.float32))
def test_float32_takes_half_the_bytes_and_keeps_the_promise(values: np.ndarray[Any, Any]) -> None:
    held = hold_in_half(values)
    assert held.nbytes == values.nbytes // 2
    check_promise(values, held.value())


@given(hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0), elements=float64s_in_range))
@example(np.array([*EDGES, 1e-300, -5e-324, np.nextafter(1.0, 2.0)]))
def test_float64_takes_a_quarter_of_the_bytes_and_keeps_the_promise(values: np.ndarray[Any, Any]) -> None:
    held = hold_in_half(values)
    assert held.nbytes == values.nbytes // 4
    check_promise(values, held.value())


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0), elements=float32s))
@example(np.array(EDGES, dtype=np.float32))
def test_pytorch_holds_the_very_bits_that_numpy_holds(values: np.ndarray[Any, Any]) -> None:
    held = hold_in_half(torch.from_numpy(values.copy()))
    assert held.nbytes == values.nbytes // 2
    restored = held.value()
    assert restored.dtype == torch.float32
    np.testing.assert_array_equal(restored.numpy(), hold_in_half(values).value())


@given(hnp.arrays(np.float64, 7, elements=float64s_in_range))
@example(np.array([1e-300, -5e-324, FLOAT32_LARGEST, -(2.0**-134), 1.0, -0.0, 3e38]))
def test_pytorch_float64_takes_a_quarter_of_the_bytes_and_keeps_the_promise(values: np.ndarray[Any, Any]) -> None:
    held = hold_in_half(torch.from_numpy(values.copy()))
    assert held.nbytes == values.nbytes // 4
    check_promise(values, held.value().numpy())


def test_the_bound_is_reached_so_it_could_not_be_tighter_by_much() -> None:
    halfway = np.array([1.0 + 2.0**-8], dtype=np.float32)
    assert hold_in_half(halfway).value()[0] == 1.0
    assert (halfway[0] - 1.0) / halfway[0] == pytest.approx(2.0**-8 / (1 + 2.0**-8), rel=1e-7)  # float32's own ulp


def test_ties_go_to_even() -> None:
    values = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20], dtype=np.float32)
    np.testing.assert_array_equal(hold_in_half(values).value(), [1.0, 1 + 2.0**-6, 1 + 2.0**-7])


def test_numbers_that_16_bits_can_say_come_back_bit_for_bit() -> None:
    every_pattern = np.arange(1 << 16, dtype=np.uint32) << 16
    values = every_pattern.view(np.float32)
    values = values[~np.isnan(values)]
    np.testing.assert_array_equal(hold_in_half(values).value().view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("beyond", [1e39, -1.7e308, np.nextafter(FLOAT32_LARGEST, np.inf)])
def test_an_array_beyond_float32s_range_is_held_bit_for_bit(beyond: float) -> None:
    values = np.array([1.1, beyond, np.inf, 1e-300])
    for held, restored in [
        (numpy_held := hold_in_half(values), numpy_held.value()),
        (torch_held := hold_in_half(torch.from_numpy(values)), torch_held.value().numpy()),
    ]:
        assert held.nbytes == values.nbytes
        np.testing.assert_array_equal(restored, values)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_a_complex_number_is_two_real_ones(dtype: type) -> None:
    values = np.array([[1.1 - 2.2j, complex(np.inf, 1e-40)], [complex(0, np.nan), 3e38 - 0.3j]], dtype=dtype)
    for held, restored in [
        (numpy_held := hold_in_half(values), numpy_held.value()),
        (torch_held := hold_in_half(torch.from_numpy(values)), torch_held.value().numpy()),
    ]:
        assert held.nbytes == 2 * 2 * values.size
        assert restored.dtype == dtype
        check_promise(values.real, restored.real)
        check_promise(values.imag, restored.imag)


def test_a_complex_number_beyond_float32s_range_is_held_bit_for_bit() -> None:
    values = np.array([complex(1.1, 1e300)])
    for held in hold_in_half(values), hold_in_half(torch.from_numpy(values)):
        assert held.nbytes == 16
        assert complex(held.value()[0]) == complex(1.1, 1e300)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint16, np.int64, np.float16])
def test_what_is_not_a_wide_float_is_held_as_it_is(dtype: type) -> None:
    values = np.array([0, 1, 1, 0, 1], dtype=dtype)
    for held, restored in [
        (numpy_held := hold_in_half(values), numpy_held.value()),
        (torch_held := hold_in_half(torch.from_numpy(values)), torch_held.value().numpy()),
    ]:
        assert held.nbytes == values.nbytes
        assert restored.dtype == dtype
        np.testing.assert_array_equal(restored, values)


def test_big_endian_numbers_come_back_big_endian() -> None:
    values = np.array([1.1, -2.2], dtype=">f4")
    restored = hold_in_half(values).value()
    assert restored.dtype == np.dtype(">f4")
    check_promise(values, restored)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_a_transposed_array_keeps_its_order_in_memory(dtype: type[np.generic]) -> None:
    values = np.arange(6, dtype=dtype).reshape(2, 3).T
    restored = hold_in_half(values).value()
    assert restored.strides == values.strides
    np.testing.assert_array_equal(restored, values)
    tensor = torch.from_numpy(values)
    assert hold_in_half(tensor).value().stride() == tensor.stride()


def test_a_numpy_scalar_comes_back_as_one() -> None:
    restored = hold_in_half(np.float32(1.5)).value()
    assert type(restored) is np.float32
    assert restored == 1.5


def test_a_masked_array_keeps_its_mask_at_full_size() -> None:
    values = np.ma.masked_array([1.1, 2.2], mask=[True, False])
    held = hold_in_half(values)
    assert held.nbytes == values.nbytes
    assert held.value().mask.tolist() == [True, False]


def test_values_handed_out_do_not_lead_back_to_the_store() -> None:
    for values in np.ones(3, dtype=np.float32), torch.ones(3), torch.ones(3, dtype=torch.complex64):
        held = hold_in_half(values)
        held.value()[:] = 7
        values[:] = 9
        assert [complex(value) for value in held.value()] == [1, 1, 1]
