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
from memfit.graph.inputs import Input, difference_in_words
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
    """Yield a list that gets the inputs of the first forward pass of ``model`` inside the block."""
    model = bare_model(model)
    noted: list[Input] = []

    def note(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not noted:
            noted.extend(inputs_of(model.forward, args, kwargs))

    # After other hooks, which may change the arguments, and beside whatever stands around the forward.
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield noted
    finally:
        hook.remove()


class InputCheck:
    """Warns once if a forward pass of a planned model gets other inputs than its plan was made for.

    The first pass is looked at as a whole; of later ones only the shapes of the arguments that are tensors, which
    takes a microsecond, and no more once there was a warning.
    """

    def __init__(self, planned: tuple[Input, ...]) -> None:
        self._planned = planned
        self._is_over = not planned
        self._agreeing_shapes: list[Any] | None = None

    def see(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the arguments of a forward pass."""
        if self._is_over or torch.compiler.is_compiling():
            return
        shapes = [getattr(value, "shape", None) for value in (*args, *kwargs.values())]
        if shapes == self._agreeing_shapes:
            return
        difference = difference_in_words(self._planned, inputs_of(forward, args, kwargs))
        if difference is None:
            self._agreeing_shapes = shapes
            return
        self._is_over = True
        warn_of_other_inputs(difference, stacklevel=3)


def warn_of_other_inputs(difference: str, *, stacklevel: int) -> None:
    """Warn of a ``difference`` between what was planned for and what there is."""
    warnings.warn(
        f"{difference}: gradients are right, the predicted peak does not hold. Plan for the largest batch "
        "that you train with",
        stacklevel=stacklevel + 1,
    )
