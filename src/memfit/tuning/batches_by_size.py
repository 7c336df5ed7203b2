"""The user's batches by size, checked to have one form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfit.capture.state.random_states import kept_random_states
from memfit.capture.step_arguments import StepArguments
from memfit.errors import InvalidParameterError
from memfit.runtime.applying.batch_tensors import named_tensors
from memfit.runtime.applying.model_inputs import dtype_name
from memfit.validation import shown


class BatchesBySize:
    """Calls ``make_batch``, and ``targets`` where the loss takes them, with a size."""

    def __init__(
        self, make_batch: Callable[[int], Any], targets: Any, arguments: dict[str, Any], global_batch: int | None
    ) -> None:
        if not callable(make_batch):
            raise InvalidParameterError(
                "make_batch is a function that returns a batch of a given size, such as lambda size: torch.randn(size, "
                f"8); got {shown(make_batch)}"
            )
        if targets is not None and not callable(targets):
            raise InvalidParameterError(
                "targets is a function that returns the targets of a batch of a given size, such as lambda size: "
                f"torch.zeros(size); got {shown(targets)}"
            )
        self._make_batch = make_batch
        self._targets = targets
        self._arguments = arguments
        self._global_batch = global_batch
        # Of the first batch: its size, and the form of its tensors.
        self._first: tuple[int, list[tuple[str, torch.dtype, int]]] | None = None
        # The size of each batch so far, by its shapes.
        self._sizes: dict[tuple[torch.Size, ...], int] = {}

    def at(self, size: int) -> StepArguments:
        """Return the step arguments with a batch of that size."""
        batch = self._called("make_batch", self._make_batch, size)
        targets = self._called("targets", self._targets, size) if self._targets is not None else None
        if batch is None:
            raise InvalidParameterError(f"make_batch({size}) returned None; it returns a batch of {size} samples")
        tensors = named_tensors((batch, targets))
        form = [(name, tensor.dtype, tensor.dim()) for name, tensor in tensors]
        shapes = tuple(tensor.shape for _, tensor in tensors)
        first_size, first_form = self._first = self._first or (size, form)
        if form != first_form:
            raise InvalidParameterError(
                f"batches of all sizes must have the same tensors, and those of make_batch({first_size}) and "
                f"make_batch({size}) differ in more than sizes: {_form_in_words(first_form)} and {_form_in_words(form)}"
            )
        other_size = self._sizes.setdefault(shapes, size)
        if size != other_size:
            raise InvalidParameterError(
                f"make_batch({other_size}) and make_batch({size}) returned batches of the same shapes "
                f"({', '.join(str(tuple(shape)) for shape in shapes) or 'no tensors'}); make_batch(size) returns a "
                "batch of that many samples. Where there are no more, repeat some, or give sizes="
            )
        arguments = dict(self._arguments)
        if self._global_batch is not None and size < self._global_batch:
            # All but the first of the steps that make up a global batch begin with gradients.
            arguments["gradients"] = "kept"
        return StepArguments(batch=batch, targets=targets, **arguments)

    def _called(self, name: str, function: Callable[[int], Any], size: int) -> Any:
        try:
            with kept_random_states():
                return function(size)
        except Exception as error:
            raise InvalidParameterError(
                f"{name}({size}) raised {type(error).__name__}: {error}. It is called with sizes that memfit tries; "
                "give sizes= to choose them. The model is as it was"
            ) from error


def _form_in_words(form: list[tuple[str, torch.dtype, int]]) -> str:
    words = [f"{dtype_name(dtype)} with {num_dims} dimensions" for _, dtype, num_dims in form]
    return ", ".join(words) or "no tensors"
