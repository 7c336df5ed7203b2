"""Arrays of any library, held so that nothing outside can change them.

No array library but NumPy is imported here, and none is asked for by name: a ``clone`` is PyTorch's way of
copying, a ``copy`` that of NumPy, JAX and CuPy, and an array without item assignment needs no copy.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from memfit.errors import InvalidParameterError
from memfit.validation import shown


class HeldArray:
    """An activation in store, as arrays of which ``rebuild`` makes an array of the caller's own.

    What is done to that array does not reach the store. ``nbytes`` are the bytes that are held, which may be fewer
    than those of the activation.
    """

    def __init__(self, parts: tuple[Any, ...], rebuild: Callable[..., Any]) -> None:
        self._parts = parts
        self._rebuild = rebuild
        self.nbytes = sum(num_bytes_of(part, "the copy of an activation") for part in parts)

    def value(self) -> Any:
        """Return the activation."""
        return self._rebuild(*self._parts)


def snapshot(array: Any) -> HeldArray:
    """Hold an array bit for bit, as it is now."""
    return HeldArray((independent_copy(array),), independent_copy)


def num_bytes_of(array: Any, what: str) -> int:
    """The array's ``nbytes``; ``what`` names the array in the error that anything without them gets."""
    try:
        num_bytes = operator.index(array.nbytes)
    except Exception:
        num_bytes = -1
    if num_bytes < 0:
        raise InvalidParameterError(
            f"{what} must be an array with a size in bytes (nbytes), of NumPy, PyTorch, JAX or another; "
            f"got {shown(array)}"
        )
    return num_bytes


def independent_copy(array: Any) -> Any:
    """An equal array that shares no memory with ``array``, or ``array`` itself where it can never change.

    A copy keeps the order of the axes in memory, because the last bit of a matrix product can depend on it;
    gaps between elements are closed. A PyTorch tensor's copy is detached: a held activation must not keep a
    graph alive.
    """
    if isinstance(array, np.generic):
        return array
    if isinstance(array, np.ndarray):
        return copy.deepcopy(array) if array.dtype.hasobject else array.copy(order="K")
    if hasattr(array, "detach") and hasattr(array, "clone"):
        return array.detach().clone()
    if hasattr(array, "copy"):
        return array.copy()
    if not hasattr(array, "__setitem__"):
        return array
    try:
        return copy.deepcopy(array)
    except Exception as error:
        raise InvalidParameterError(
            f"an activation must be an array that can be copied; {shown(array)} cannot: {error}"
        ) from error
