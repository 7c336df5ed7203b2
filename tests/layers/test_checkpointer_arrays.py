"""The checkpointer on arrays of several libraries: what it holds cannot be changed, and comes back as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memfit.errors import InvalidParameterError
from memfit.layers.checkpointing.checkpointer import ActivationCheckpointer, CheckpointConfig


class FrozenNamespace:
    """The part of the array API's namespace that brings NumPy's numbers back."""

    @staticmethod
    def asarray(numbers: Any) -> FrozenArray:
        return FrozenArray(numbers)


class FrozenArray:
    """An array like JAX's: it cannot be assigned to, has no copy, and speaks the array API and NumPy's protocol."""

    def __init__(self, numbers: Any) -> None:
        self._numbers = np.array(numbers)
        self._numbers.flags.writeable = False

    @property
    def nbytes(self) -> int:
        return self._numbers.nbytes

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._numbers.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self._numbers, dtype=dtype, copy=copy)

    def __array_namespace__(self, *, api_version: str | None = None) -> type[FrozenNamespace]:
        return FrozenNamespace

    def __mul__(self, factor: float) -> FrozenArray:
        return FrozenArray(self._numbers * self._numbers.dtype.type(factor))

    def __add__(self, other: float) -> FrozenArray:
        return FrozenArray(self._numbers + self._numbers.dtype.type(other))


class SizeOnly:
    """All that is asked of an array at full precision: a size in bytes."""

    nbytes = 12

    def __init__(self, value: float) -> None:
        self.value = value


class Uncopyable:
    """Can be changed in place, but not copied."""

    nbytes = 4

    def __setitem__(self, key: object, value: object) -> None:
        raise NotImplementedError

    def __deepcopy__(self, memo: object) -> Uncopyable:
        raise RuntimeError("this memory belongs to a device")


ANY_DTYPE = st.sampled_from(["?", "i1", "u8", "f2", "f4", ">f4", "f8", "c8", "c16", "M8[s]", "S3", "U2"])


def affine(activation: Any, layer: int) -> Any:
    return activation * 1.1 + 0.01 * layer


@given(ANY_DTYPE.flatmap(lambda code: hnp.arrays(code, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))))
def test_numpy_arrays_of_any_shape_and_type_come_back_bit_for_bit(values: np.ndarray[Any, Any]) -> None:
    checkpointer = ActivationCheckpointer()
    checkpointer.save(0, values)
    restored = checkpointer.get(0)
    assert restored.dtype == values.dtype
    assert restored.shape == values.shape
    assert restored.tobytes() == values.tobytes()
    assert checkpointer.memory_stored_bytes == values.nbytes


@pytest.mark.parametrize("use_mixed_precision", [False, True])
@pytest.mark.parametrize("library", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_a_checkpoint_is_a_snapshot_in_both_directions(library: Any, use_mixed_precision: bool) -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(use_mixed_precision=use_mixed_precision))
    values = library([1.0, 2.0, 4.0])
    checkpointer.save(3, values)
    values[:] = 9.0
    handed_out = checkpointer.get(3)
    handed_out[:] = 7.0
    assert checkpointer.get(3).tolist() == [1.0, 2.0, 4.0]


def test_a_view_is_held_without_the_gaps_between_its_elements() -> None:
    checkpointer = ActivationCheckpointer()
    everything = np.arange(1000.0)
    checkpointer.save(0, everything[::100])
    assert checkpointer.memory_stored_bytes == 80
    assert checkpointer.get(0).tolist() == everything[::100].tolist()
    checkpointer.save(0, torch.arange(1000.0)[::100])
    assert checkpointer.memory_stored_bytes == 40


def test_the_order_of_the_axes_in_memory_survives() -> None:
    checkpointer = ActivationCheckpointer()
    transposed = np.arange(12.0).reshape(3, 4).T
    checkpointer.save(0, transposed)
    assert checkpointer.get(0).strides == transposed.strides
    channels_last = torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last)
    checkpointer.save(0, channels_last)
    assert checkpointer.get(0).stride() == channels_last.stride()


def test_an_array_of_objects_is_held_with_its_objects() -> None:
    checkpointer = ActivationCheckpointer()
    values = np.array([[1], [2, 3]], dtype=object)
    checkpointer.save(0, values)
    values[0].append(9)
    assert checkpointer.get(0).tolist() == [[1], [2, 3]]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int32, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_torch_tensors_of_any_shape_and_type_come_back_as_they_were(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.ones(shape, dtype=dtype)
    checkpointer = ActivationCheckpointer()
    checkpointer.save(0, values)
    restored = checkpointer.get(0)
    assert restored.dtype == dtype
    assert torch.equal(restored, values)
    assert restored.data_ptr() != values.data_ptr() or values.numel() == 0


def test_a_stored_tensor_holds_no_graph() -> None:
    values = (torch.ones(3, requires_grad=True) * 2).exp()
    checkpointer = ActivationCheckpointer(CheckpointConfig(max_checkpoints=2))
    checkpointer.save(0, values)
    assert checkpointer.get(0).grad_fn is None
    assert torch.equal(checkpointer.get(0), values)


def test_an_immutable_array_is_held_without_a_copy() -> None:
    checkpointer = ActivationCheckpointer()
    values = FrozenArray(np.ones(3))
    checkpointer.save(0, values)
    assert checkpointer.get(0) is values


def test_a_chain_of_immutable_arrays_runs_recomputes_and_sweeps() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, 2))
    layers = range(9)
    output = checkpointer.checkpointed_forward(FrozenArray(np.float32([1, 2])), layers, affine)
    direct = FrozenArray(np.float32([1, 2]))
    outputs = [direct := affine(direct, layer) for layer in layers]
    np.testing.assert_array_equal(np.asarray(output), np.asarray(direct))
    for layer in layers:
        recomputed = checkpointer.recompute_from_checkpoint(layer, layers, affine)
        np.testing.assert_array_equal(np.asarray(recomputed), np.asarray(outputs[layer]))
    gradient = checkpointer.backward(FrozenArray(np.float32([1, 1])), layers, affine, lambda x, layer, g: g * 1.1)
    assert np.asarray(gradient) == pytest.approx([1.1**9] * 2, rel=1e-6)  # float32, nine roundings


class NamelessArray:
    """An immutable array without a namespace: its type, called with NumPy's numbers, is the way back."""

    def __init__(self, numbers: Any) -> None:
        self._numbers = np.array(numbers)

    nbytes = property(lambda self: self._numbers.nbytes)
    dtype = property(lambda self: self._numbers.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self._numbers, dtype=dtype, copy=copy)


@pytest.mark.parametrize("kind", [FrozenArray, NamelessArray])
def test_an_array_that_speaks_numpy_is_held_in_16_bits_and_comes_back_in_its_own_type(kind: Any) -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(use_mixed_precision=True))
    values = kind(np.float32([[1.1, -3e38, 1e-40]]))
    checkpointer.save(0, values)
    assert checkpointer.memory_stored_bytes == values.nbytes // 2
    restored = checkpointer.get(0)
    assert type(restored) is kind
    assert restored.dtype == np.float32
    assert np.asarray(restored)[0, :2] == pytest.approx([1.1, -3e38], rel=2**-8)
    assert np.asarray(restored)[0, 2] > 0


class OneWayArray(NamelessArray):
    """It goes to NumPy, but its type does not take NumPy's numbers back."""

    def __init__(self, numbers: Any, *, device: str) -> None:
        super().__init__(numbers)
        self.device = device


class HomeboundArray(FrozenArray):
    """Like CuPy's: it does not go to NumPy unasked."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        raise TypeError("implicit conversion to a NumPy array is not allowed")


@pytest.mark.parametrize("values", [HomeboundArray(np.ones(3)), OneWayArray(np.ones(3), device="far")])
def test_an_array_without_a_way_to_numpy_and_back_is_held_at_full_size(values: Any) -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(use_mixed_precision=True))
    checkpointer.save(0, values)
    assert checkpointer.get(0) is values
    assert checkpointer.memory_stored_bytes == 24


@pytest.mark.parametrize("use_mixed_precision", [False, True])
def test_a_size_in_bytes_is_all_that_is_needed(use_mixed_precision: bool) -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, 8, use_mixed_precision))
    layers = [0, 1, 2, 3]
    output = checkpointer.checkpointed_forward(SizeOnly(1.0), layers, lambda x, layer: SizeOnly(x.value + layer))
    assert output.value == 7.0
    assert checkpointer.memory_stored_bytes == checkpointer.memory_saved_bytes == 24
    assert checkpointer.recompute_from_checkpoint(1, layers, lambda x, layer: SizeOnly(x.value + layer)).value == 2.0


def test_scalars_of_numpy_pass_through_a_chain_without_axes() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, 8))
    output = checkpointer.checkpointed_forward(np.array(1.0), range(4), affine)
    assert isinstance(output, np.float64)
    assert checkpointer.memory_stored_bytes == checkpointer.memory_saved_bytes == 16


def test_an_array_that_cannot_be_copied_is_refused_with_the_reason() -> None:
    checkpointer = ActivationCheckpointer()
    with pytest.raises(InvalidParameterError, match="this memory belongs to a device"):
        checkpointer.save(0, Uncopyable())
    assert checkpointer.num_checkpoints == 0


@pytest.mark.parametrize("no_array", [3.5, None, [1.0, 2.0], "text", object()])
def test_what_has_no_size_in_bytes_is_refused(no_array: object) -> None:
    checkpointer = ActivationCheckpointer()
    with pytest.raises(InvalidParameterError, match=r"the activation of layer 4 must be an array .*nbytes"):
        checkpointer.save(4, no_array)
    with pytest.raises(InvalidParameterError, match="the input must be an array"):
        checkpointer.checkpointed_forward(no_array, [0], lambda x, layer: x)
    with pytest.raises(InvalidParameterError, match="what forward_fn returned for layer 5 must be an array"):
        checkpointer.checkpointed_forward(np.ones(1), [4, 5], lambda x, layer: x if layer == 4 else no_array)
    assert checkpointer.num_checkpoints == checkpointer.memory_input_bytes == 0
