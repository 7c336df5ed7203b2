"""Looks at each forward pass of a model with a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memfit.graph.inputs import Input
from memfit.runtime.applying.forward_wrapping import Forward
from memfit.runtime.checks.input_check import InputCheck
from memfit.runtime.checks.model_changes import ModelChanges


class PassCheck:
    """Warns of inputs, and of changes of the model, that a plan was not made for."""

    def __init__(self, model: nn.Module, inputs: tuple[Input, ...]) -> None:
        self._inputs = InputCheck(inputs)
        self._changes = ModelChanges(model)

    def see(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at a forward pass of the model that is about to run."""
        self._changes.see()
        self._inputs.see(forward, args, kwargs)

    def run_model(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward pass as it is, and look at it where it has gradients."""
        if torch.is_grad_enabled():
            self.see(forward, args, kwargs)
        return forward(*args, **kwargs)
