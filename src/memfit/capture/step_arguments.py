"""What a training step may be made of besides the model and the batch, checked before anything runs."""

from __future__ import annotations

import inspect

import torch

from memfit.errors import InvalidParameterError
from memfit.validation import shown


def refuse_unfit_arguments(loss: object, optimizer: object) -> None:
    """Raise unless ``loss`` is a function or None, and ``optimizer`` one whose ``step()`` runs alone, or None."""
    if loss is not None and not callable(loss):
        raise InvalidParameterError(
            "loss is a function of the model's output that returns a scalar, such as lambda output: output.mean(), or "
            f"None; got {shown(loss)}"
        )
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidParameterError(f"optimizer is a torch.optim.Optimizer or None, got {type(optimizer).__name__}")
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        raise InvalidParameterError(
            f"{type(optimizer).__name__}.step() needs a closure, which it calls as often as it likes, and a plan is "
            "for a step with one forward and one backward pass. Leave optimizer out: the plan then bounds each call of "
            "the closure, and the memory that the optimizer itself takes comes on top"
        ) from None
