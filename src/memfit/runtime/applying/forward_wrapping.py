"""Wraps the forward of a module on the instance, and restores it.

The class, the state dict and the hooks of the module stay as they are. A plain ``with`` inside the wrapper sees every
exception, which forward hooks do not: they miss KeyboardInterrupt.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]
# Called with the wrapped forward, its positional and its keyword arguments.
Runner = Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]


class WrappedForward:
    """Stands in for ``module.forward``. A copied or pickled module gets its own plain forward instead."""

    def __init__(self, forward: Forward, runner: Runner, owner: object = None) -> None:
        functools.update_wrapper(self, forward)
        self.__wrapped__ = forward
        self.runner: Runner | None = runner
        self.owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.runner is None:
            return self.__wrapped__(*args, **kwargs)
        if torch.compiler.is_compiling():
            # Ops of a traced graph are not recorded: it is traced as without a plan.
            if self.owner is not None:
                _warn_of_tracing()
            return self.__wrapped__(*args, **kwargs)
        return self.runner(self.__wrapped__, args, kwargs)

    @property
    def __code__(self) -> Any:
        """What torch.export asks a forward for."""
        return self.__wrapped__.__code__

    def __reduce__(self) -> tuple[Any, ...]:
        # The bound method is copied with its module, so that a copy uses its own weights.
        return _itself, (self.__wrapped__,)


def wrap_forward(module: nn.Module, runner: Runner, owner: object = None) -> Callable[[], None]:
    """Wrap the module's forward in ``runner`` for ``owner``; return a function that undoes it."""
    before = vars(module).get("forward")
    wrapped = WrappedForward(module.forward, runner, owner)
    if owner is not None:
        _tracing_warnings.clear()
    vars(module)["forward"] = wrapped

    def unwrap() -> None:
        wrapped.runner = None
        if vars(module).get("forward") is not wrapped:
            return  # It was wrapped again by other code; this wrapper stays inside and does nothing.
        if before is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = before

    return unwrap


def bare_forward(forward: Forward) -> Forward:
    """Return ``forward`` without the wrappers around it that do nothing now, because their plans are set aside."""
    while isinstance(forward, WrappedForward) and forward.runner is None:
        forward = forward.__wrapped__
    return forward


def is_wrapped(module: nn.Module) -> bool:
    """Return whether a plan wraps the module's forward now."""
    return bool(owners_of_wrappers(module))


def owners_of_wrappers(module: nn.Module) -> list[object]:
    """Return the owners of the wrappers of the module's forward, the outermost first."""
    forward = vars(module).get("forward")
    owners = []
    while forward is not None:
        if isinstance(forward, WrappedForward) and forward.runner is not None and forward.owner is not None:
            owners.append(forward.owner)
        forward = getattr(forward, "__wrapped__", None)
    return owners


@contextmanager
def plans_set_aside(model: nn.Module) -> Iterator[None]:
    """Run the model without its plans inside the block, those on its parts included."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    wrapped = [(forward, forward.runner) for forward in forwards if isinstance(forward, WrappedForward)]
    try:
        for forward, _ in wrapped:
            forward.runner = None
        yield
    finally:
        for forward, runner in wrapped:
            forward.runner = runner


# Those given since a plan was last put on a model: many modules of one are traced, in many graphs.
_tracing_warnings: list[str] = []


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_of_tracing() -> None:
    """Warn once that a graph for training is a plain one. Dynamo calls it while it traces, and takes no arguments."""
    if _tracing_warnings or not torch.is_grad_enabled() or torch.compiler.is_exporting():
        return
    _tracing_warnings.append(
        "a model with a plan of memfit, or a part of it, is compiled from outside: it runs as without the plan, and "
        "the budget does not hold. memfit.fit(..., compile=True) plans compiled blocks; memfit.remove(model) takes the "
        "plan off"
    )
    warnings.warn(_tracing_warnings[0], stacklevel=2)


def _itself(forward: Forward) -> Forward:
    return forward
