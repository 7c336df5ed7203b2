"""Notices inputs that are larger than those that a plan was made for."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from memfit.graph.inputs import Input, growth_in_words, largest_inputs
from memfit.runtime.applying.forward_wrapping import Forward
from memfit.runtime.applying.model_inputs import inputs_of

_UNKNOWN = "unknown"
_MOST_KNOWN_SHAPES = 10_000


class InputCheck:
    """Warns where a forward pass of a planned model gets larger inputs than its plan was made for, and than any before.

    Smaller inputs, and numbers, are within the plan. A pass whose arguments have shapes that were seen already takes a
    microsecond.
    """

    def __init__(self, planned: tuple[Input, ...]) -> None:
        self._planned = set(planned)
        self._largest = planned
        self._is_off = not planned
        self._known_shapes: set[tuple[Any, ...]] = set()

    def are_planned_ones(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the arguments of a forward pass have the shapes that the plan was made for."""
        return self._is_off or set(inputs_of(forward, args, kwargs)) == self._planned

    def see(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the arguments of a forward pass."""
        if self._is_off:
            return
        shapes = (*map(_shape_of, args), *kwargs, *map(_shape_of, kwargs.values()))
        if _UNKNOWN not in shapes and shapes in self._known_shapes:
            return
        inputs = inputs_of(forward, args, kwargs)
        growth = growth_in_words(self._largest, inputs)
        if growth is not None:
            self._largest = largest_inputs(self._largest, inputs)
            warn_of_larger_inputs(growth, stacklevel=3)
        if len(self._known_shapes) == _MOST_KNOWN_SHAPES:
            self._known_shapes.clear()
        self._known_shapes.add(shapes)


def _shape_of(value: Any) -> Any:
    """Return a key of an argument that was seen before; None for arguments that may contain tensors."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return None if value is None or isinstance(value, (bool, int, float, str)) else _UNKNOWN


def warn_of_larger_inputs(growth: str, *, stacklevel: int) -> None:
    """Warn of inputs that are larger than those that were planned for, in the words of `growth_in_words`."""
    warnings.warn(
        f"{growth}: gradients are right, the predicted peak does not hold. Plan for the largest batch "
        "that you train with",
        stacklevel=stacklevel + 1,
    )
