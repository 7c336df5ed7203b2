"""The inputs of a model: noted when a step is measured, and compared when it runs by a plan."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memfit.distributed.wrapped_models import bare_model
from memfit.graph.inputs import Input, largest_inputs
from memfit.runtime.applying.batch_tensors import named_tensors
from memfit.runtime.applying.forward_wrapping import Forward


def inputs_of(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Input, ...]:
    """Return the tensors among the arguments, named as ``forward`` names them, however they were passed."""
    try:
        arguments: dict[str, Any] = inspect.signature(forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        # If the call is wrong, the model raises the error.
        arguments = {str(place): value for place, value in enumerate(args)} | kwargs
    return tuple(
        Input(name, dtype_name(tensor.dtype), tuple(map(int, tensor.shape)))
        for name, tensor in named_tensors(arguments)
        # The sizes of a nested tensor are those of its parts.
        if not tensor.is_nested
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as inputs have it, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


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

    # After other hooks, which may change the arguments, and next to other wrappers of the forward.
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield noted
    finally:
        hook.remove()
