"""Looks at each forward pass of a model with a plan: at its inputs, at the model, and at the ops that ran."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memfit.graph.inputs import Input, growth_in_words, largest_inputs
from memfit.runtime.applying.forward_wrapping import Forward
from memfit.runtime.applying.model_inputs import inputs_of
from memfit.runtime.checks.model_changes import ModelChanges
from memfit.runtime.engine.forward_pass import UnplannedCalls

_UNKNOWN = "unknown"
_MOST_KNOWN_SHAPES = 10_000


class PassCheck:
    """Warns of larger inputs, changes of the model and, once, of op calls that a plan was not made for.

    Inputs are larger than those of the plan, and than any before; smaller ones, and numbers, are within the plan.
    """

    def __init__(self, model: nn.Module, inputs: tuple[Input, ...], *, warns_of_calls: bool) -> None:
        self._planned = inputs
        self._largest = inputs
        self._known_shapes: set[tuple[Any, ...]] = set()
        self._changes = ModelChanges(model)
        # The first calls that were not as planned, of which nobody is warned where this is off.
        self.unplanned: UnplannedCalls | None = None
        self._warns_of_calls = warns_of_calls

    def see(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at a forward pass of the model that is about to run."""
        if self._changes.see():
            # Why ops do not run as planned was said.
            self._warns_of_calls = False
        if self._planned:
            self._see_inputs(forward, args, kwargs)

    def _see_inputs(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Arguments of shapes that were seen already take a microsecond, others a hundred.
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

    def calls_of_pass(
        self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[UnplannedCalls | None], None] | None:
        """Return what is to be called when the pass has run; None where nothing is left to warn of.

        Smaller inputs may come with fewer calls.
        """
        if self.unplanned is not None:
            return None

        def see_calls(unplanned: UnplannedCalls | None) -> None:
            if unplanned is None or self.unplanned is not None:
                return
            if unplanned.num_calls < unplanned.num_planned and not self._are_planned(inputs_of(forward, args, kwargs)):
                return
            self.unplanned = unplanned
            if self._warns_of_calls:
                warn_of_calls(unplanned.in_words(), stacklevel=2)

        return see_calls

    def _are_planned(self, inputs: tuple[Input, ...]) -> bool:
        return not self._planned or set(inputs) == set(self._planned)

    def run_model(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward pass as it is, and look at it where it has gradients."""
        if torch.is_grad_enabled():
            self.see(forward, args, kwargs)
        return forward(*args, **kwargs)


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


def warn_of_calls(difference: str, *, stacklevel: int) -> None:
    """Warn of a forward pass that is not as planned, in the words of `UnplannedCalls.in_words`."""
    warnings.warn(
        f"a forward pass is not as planned: {difference}. Gradients are right, the predicted peak may not hold. Fit "
        "the model again with a step that runs as your training steps do",
        stacklevel=stacklevel + 1,
    )
