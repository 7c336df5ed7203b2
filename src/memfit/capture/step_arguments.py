"""What a training step is made of besides the model, checked before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from memfit.errors import InvalidParameterError
from memfit.validation import shown

Loss = Callable[..., Tensor]
StepFunction = Callable[..., object]
GradientsMode = Literal["fresh", "kept"]


@dataclass(frozen=True, slots=True, eq=False)
class StepArguments:
    """The step arguments of `profile`, `verify` and `fit`. What is wrong with them is an ``InvalidParameterError``.

    ``batch``: a tuple or list is passed as ``model(*batch)``, a dict as ``model(**batch)``, anything else as
    ``model(batch)``.
    ``loss(output)`` returns the scalar to differentiate; with ``targets``, ``loss(output, targets)``. Without ``loss``
    it is the output's own loss, or the output where that is a scalar.
    ``step(batch)``, or ``step()`` where ``batch`` is None, is a whole training step in place of ``loss``: forward
    passes, loss and backward passes as the training loop runs them.
    ``optimizer`` is stepped at the end of the step, except where ``step`` does that. Wrappers of optimizers that have
    the wrapped one as ``.optimizer`` are accepted.
    ``gradients`` is "fresh" where they are None before each step, "kept" where they live from step to step.
    """

    batch: Any = None
    loss: Loss | None = None
    targets: Any = None
    step: StepFunction | None = None
    optimizer: Any = None
    gradients: GradientsMode = "fresh"

    def __post_init__(self) -> None:
        if self.gradients not in get_args(GradientsMode):
            raise InvalidParameterError(f"gradients is 'fresh' or 'kept', got {shown(self.gradients)}")
        if self.step is not None:
            self._refuse_unfit_step()
        elif self.batch is None:
            raise InvalidParameterError(
                "batch is missing: pass what the model is called with, such as a tensor, a tuple or a dict (an empty "
                "tuple for a model that takes no arguments), or step=, a function that runs a training step"
            )
        self._refuse_unfit_loss()
        if self.optimizer is not None:
            _refuse_unfit_optimizer(self.optimizer)

    def _refuse_unfit_step(self) -> None:
        if not callable(self.step):
            raise InvalidParameterError(f"step is a function that runs one training step, got {shown(self.step)}")
        if self.loss is not None or self.targets is not None:
            raise InvalidParameterError(
                "step= is the whole training step, loss included: leave out loss= and targets=, or leave out step="
            )
        arguments = () if self.batch is None else (self.batch,)
        if not _takes(self.step, arguments):
            called = "step(batch)" if arguments else "step(), because batch is None"
            raise InvalidParameterError(
                f"step is called as {called}; it takes ({', '.join(_parameters_of(self.step) or ())})"
            )

    def _refuse_unfit_loss(self) -> None:
        loss = self.loss
        if loss is None:
            if self.targets is not None:
                raise InvalidParameterError(
                    "targets= needs loss=, a function such as torch.nn.CrossEntropyLoss() that is called as "
                    "loss(output, targets)"
                )
            return
        if not callable(loss):
            raise InvalidParameterError(
                "loss is a function of the model's output that returns a scalar, such as lambda output: "
                f"output.mean(), or None; got {shown(loss)}"
            )
        if isinstance(loss, type) and issubclass(loss, nn.Module):
            raise InvalidParameterError(f"loss is the class {loss.__name__}; pass an instance: {loss.__name__}()")
        if self.targets is None and not _takes(loss, (None,)):
            names = ", ".join(_parameters_of(loss) or ())
            advice = "pass targets=..., and it is called as loss(output, targets)" if _takes(loss, (None, None)) else ""
            raise InvalidParameterError(
                f"loss is called as loss(output), and it takes ({names}); "
                f"{advice or 'pass a function of the output, such as lambda output: output.mean()'}"
            )
        if self.targets is not None and not _takes(loss, (None, None)):
            raise InvalidParameterError(
                f"with targets=, loss is called as loss(output, targets), and it takes "
                f"({', '.join(_parameters_of(loss) or ())}); leave out targets=, or pass a loss that takes both"
            )


def optimizers_within(optimizer: Any) -> Iterator[Any]:
    """Yield ``optimizer`` and, where it is a wrapper, what it wraps, down to the innermost."""
    seen: set[int] = set()
    while optimizer is not None and id(optimizer) not in seen:
        seen.add(id(optimizer))
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def innermost_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that has the state: the innermost where ``optimizer`` is a wrapper."""
    innermost = None
    for innermost in optimizers_within(optimizer):  # noqa: B007  # the last one is wanted
        pass
    return innermost


def _refuse_unfit_optimizer(optimizer: Any) -> None:
    innermost = innermost_optimizer(optimizer)
    if not isinstance(innermost, torch.optim.Optimizer):
        raise InvalidParameterError(
            f"optimizer is a torch.optim.Optimizer, a wrapper that has one as .optimizer, or None; "
            f"got {type(optimizer).__name__}"
        )
    refuse_optimizer_with_closures(innermost)


def refuse_optimizer_with_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raise where ``optimizer`` cannot step without a closure."""
    # The method of the class: learning rate schedulers put a wrapper with another signature on the instance.
    if not _takes(type(optimizer).step, (optimizer,)):
        raise InvalidParameterError(
            f"{type(optimizer).__name__}.step() needs a closure, which it calls as often as it likes, and a plan is "
            "for a step with a known number of forward and backward passes. Leave the optimizer out, of step= too: the "
            "plan then bounds each call of the closure, and the memory that the optimizer itself takes comes on top"
        )


def _takes(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether ``function`` can be called with ``arguments``; True where its signature is not known."""
    signature = _signature_of(function)
    if signature is None:
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _parameters_of(function: Any) -> list[str] | None:
    signature = _signature_of(function)
    return None if signature is None else [str(parameter) for parameter in signature.parameters.values()]


def _signature_of(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return None
