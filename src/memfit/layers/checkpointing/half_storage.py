"""Activations held in 16 bits a number, with float32's range: nothing becomes infinite, nothing vanishes.

A real number x is restored as y with

    |y - x| <= max(2**-8 * |x|, 2**-133),

with the sign of x, zero only where x is zero, finite exactly where x is finite, and NaN where x is NaN. The
second bound only speaks below 2**-126, float32's smallest normal number. A complex number is two real ones.

The 16 bits are the upper half of a float32, rounded to nearest, ties to even. Two roundings are turned
back: a finite number that would become infinite becomes the largest finite one, and a number that would
become zero becomes the smallest one.

NumPy's arrays and PyTorch's tensors are held by their own libraries. Other arrays, JAX's among them, go
through NumPy's ``__array__`` where NumPy's arrays can be converted back, by ``asarray`` of their
``__array_namespace__`` or, without one, by their type. What is held is then in NumPy's memory, on the host.

Held as they are, at full size: integers, booleans, floats of 16 bits and fewer; an array with a finite
number beyond float32's range, which only wider types have; subclasses of NumPy's array; and arrays of any
other library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.layers.checkpointing.array_snapshot import HeldArray, snapshot

LARGEST = (2.0 - 2.0**-7) * 2.0**127
SMALLEST = 2.0**-133
_FLOAT32_LARGEST = float(np.finfo(np.float32).max)


def hold_in_half(array: Any) -> HeldArray:
    """Hold an activation in 16 bits a number where that keeps this module's promise, else bit for bit."""
    held: HeldArray | None = None
    if isinstance(array, np.generic):
        # NumPy's functions return a scalar where an array has no axes.
        held = _hold_numpy(np.asarray(array), lambda restored: restored[()])
    elif isinstance(array, np.ndarray):
        # A subclass, a masked array say, has more to it than its numbers.
        held = _hold_numpy(array, lambda restored: restored) if type(array) is np.ndarray else None
    elif all(hasattr(array, name) for name in ("bfloat16", "is_floating_point", "is_complex", "element_size")):
        held = _hold_torch_like(array.detach())
    elif hasattr(array, "__array__"):
        held = _hold_through_numpy(array)
    return snapshot(array) if held is None else held


def _encode(array: npt.NDArray[Any]) -> npt.NDArray[np.uint16] | None:
    """The 16-bit form of a real floating array, or None where a finite element is beyond float32's range."""
    if array.dtype.itemsize > 4 and bool(np.any(np.isfinite(array) & (np.abs(array) > _FLOAT32_LARGEST))):
        return None
    bits = array.astype(np.float32).view(np.uint32)
    halves = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    magnitudes = halves & np.uint32(0x7FFF)
    # The carry of the rounding may reach the exponent that means infinity, or have nothing to carry into.
    halves = halves - ((magnitudes == 0x7F80) & np.isfinite(array))
    halves = halves | ((magnitudes == 0) & (array != 0))
    # A NaN's sign survives; its payload, which the rounding may have wrapped around, does not.
    halves = np.where(np.isnan(array), ((bits >> 16) & np.uint32(0x8000)) | np.uint32(0x7FC0), halves)
    return np.asarray(halves, dtype=np.uint16)


def _decode(halves: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The numbers of a 16-bit form."""
    return np.asarray((halves.astype(np.uint32) << 16).view(np.float32))


def _hold_numpy(whole: npt.NDArray[Any], finish: Callable[[Any], Any]) -> HeldArray | None:
    dtype, is_complex = whole.dtype, whole.dtype.kind == "c"
    if dtype.kind not in "fc" or dtype.itemsize <= (4 if is_complex else 2):
        return None

    def rebuild(real: npt.NDArray[np.uint16], *imaginary: npt.NDArray[np.uint16]) -> Any:
        restored = _decode(real).astype(dtype)
        for part in imaginary:
            restored.imag[...] = _decode(part)
        return finish(restored)

    return _held((whole.real, whole.imag) if is_complex else (whole,), _encode, rebuild)


def _hold_through_numpy(array: Any) -> HeldArray | None:
    convert_back = array.__array_namespace__().asarray if hasattr(array, "__array_namespace__") else type(array)
    try:
        whole = np.asarray(array)
        # Converting back is tried before the array is let go of. CuPy refuses the conversion to NumPy already.
        returned = convert_back(whole)
    except Exception:
        return None
    return _hold_numpy(whole, convert_back) if type(returned) is type(array) else None


def _hold_torch_like(whole: Any) -> HeldArray | None:
    dtype, is_complex = whole.dtype, whole.is_complex()
    if not (whole.is_floating_point() or is_complex) or whole.element_size() <= (4 if is_complex else 2):
        return None

    def rebuild(real: Any, *imaginary: Any) -> Any:
        restored = real.to(dtype)
        for part in imaginary:
            restored.imag[...] = part
        return restored

    return _held((whole.real, whole.imag) if is_complex else (whole,), _torch_like_halves, rebuild)


def _held(parts: Sequence[Any], halves_of: Callable[[Any], Any], rebuild: Callable[..., Any]) -> HeldArray | None:
    """Hold the real parts of an array, unless one of them has numbers beyond float32's range."""
    halves = tuple(halves_of(part) for part in parts)
    return None if any(half is None for half in halves) else HeldArray(halves, rebuild)


def _torch_like_halves(array: Any) -> Any:
    finite = array.isfinite()
    if array.element_size() > 4 and bool((finite & (array.abs() > _FLOAT32_LARGEST)).any()):
        return None
    halves = array.clamp(-LARGEST, LARGEST).where(finite, array).bfloat16()
    vanished = (halves == 0) & (array != 0)
    return (array.sign() * SMALLEST).bfloat16().where(vanished, halves)
