"""Looks at each forward pass of a model with a plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memfit.graph.inputs import Input
from memfit.runtime.applying.forward_wrapping import Forward
from memfit.runtime.checks.input_check import InputCheck
from memfit.runtime.checks.model_changes import ModelChanges
from memfit.runtime.engine.forward_pass import UnplannedCalls


class PassCheck:
    """Warns of inputs, changes of the model and, once, of op calls that a plan was not made for."""

    def __init__(self, model: nn.Module, inputs: tuple[Input, ...], *, warns_of_calls: bool) -> None:
        self._inputs = InputCheck(inputs)
        self._changes = ModelChanges(model)
        # The first calls that were not as planned, of which nobody is warned where this is off.
        self.unplanned: UnplannedCalls | None = None
        self._warns_of_calls = warns_of_calls

    def see(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at a forward pass of the model that is about to run."""
        if self._changes.see():
            # Why ops do not run as planned was said.
            self._warns_of_calls = False
        self._inputs.see(forward, args, kwargs)

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
            if unplanned.num_calls < unplanned.num_planned and not self._inputs.are_planned_ones(forward, args, kwargs):
                return
            self.unplanned = unplanned
            if self._warns_of_calls:
                warn_of_calls(unplanned.in_words(), stacklevel=2)

        return see_calls

    def run_model(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward pass as it is, and look at it where it has gradients."""
        if torch.is_grad_enabled():
            self.see(forward, args, kwargs)
        return forward(*args, **kwargs)


def warn_of_calls(difference: str, *, stacklevel: int) -> None:
    """Warn of a forward pass that is not as planned, in the words of `UnplannedCalls.in_words`."""
    warnings.warn(
        f"a forward pass is not as planned: {difference}. Gradients are right, the predicted peak may not hold. Fit "
        "the model again with a step that runs as your training steps do",
        stacklevel=stacklevel + 1,
    )
