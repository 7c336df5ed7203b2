"""What a model is called with: noted when a step is measured, and compared when it runs by a plan."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memfit.distributed.wrapped_models import bare_model
from memfit.graph.inputs import Input, difference_in_words, larger_inputs, largest_inputs
from memfit.runtime.batch_tensors import named_tensors
from memfit.runtime.forward_wrapping import Forward


def inputs_of(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Input, ...]:
    """Return the tensors among the arguments, named as ``forward`` names them, however they were passed."""
    try:
        arguments: dict[str, Any] = inspect.signature(forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        # What is wrong with the call, if anything, is for the model to say.
        arguments = {str(place): value for place, value in enumerate(args)} | kwargs
    return tuple(
        Input(name, str(tensor.dtype).removeprefix("torch."), tuple(map(int, tensor.shape)))
        for name, tensor in named_tensors(arguments)
        # Those of nested tensors are told by their parts only.
        if not tensor.is_nested
    )


@contextmanager
def noting_inputs(model: nn.Module) -> Iterator[list[Input]]:
    """Yield a list that gets the inputs of the forward passes of ``model`` inside the block, the largest of several.

    Passes without gradients do not count: plans leave them alone.
    """
    model = bare_model(model)
    noted: list[Input] = []

    def note(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            noted[:] = largest_inputs(noted, inputs_of(model.forward, args, kwargs))

    # After other hooks, which may change the arguments, and beside whatever stands around the forward.
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield noted
    finally:
        hook.remove()


class InputCheck:
    """Warns where a forward pass of a planned model gets larger inputs than its plan was made for, and than any before.

    Smaller inputs, and numbers, are within the plan. A pass whose arguments have shapes that were seen already takes a
    microsecond.
    """

    def __init__(self, planned: tuple[Input, ...]) -> None:
        self._largest = planned
        self._is_off = not planned
        self._known_shapes: set[tuple[Any, ...]] = set()

    def see(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the arguments of a forward pass."""
        if self._is_off:
            return
        shapes = (*map(_shape_of, args), *kwargs, *map(_shape_of, kwargs.values()))
        if _UNKNOWN not in shapes and shapes in self._known_shapes:
            return
        inputs = inputs_of(forward, args, kwargs)
        larger = larger_inputs(self._largest, inputs)
        if larger:
            difference = difference_in_words([each for each in self._largest if _is_among(each, larger)], larger)
            self._largest = largest_inputs(self._largest, inputs)
            warn_of_other_inputs(difference or "", stacklevel=3)
        if len(self._known_shapes) == _MOST_KNOWN_SHAPES:
            self._known_shapes.clear()
        self._known_shapes.add(shapes)


_UNKNOWN = "unknown"
_MOST_KNOWN_SHAPES = 10_000


def _shape_of(value: Any) -> Any:
    """Return what says whether an argument was seen already: nothing does of one that may contain tensors."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return None if value is None or isinstance(value, (bool, int, float, str)) else _UNKNOWN


def _is_among(each: Input, others: list[Input]) -> bool:
    return any(each.name == other.name for other in others)


def warn_of_other_inputs(difference: str, *, stacklevel: int) -> None:
    """Warn of a ``difference`` between what was planned for and what there is."""
    warnings.warn(
        f"{difference}: gradients are right, the predicted peak does not hold. Plan for the largest batch "
        "that you train with",
        stacklevel=stacklevel + 1,
    )
