"""Runs a step on fake tensors: they stand in for the model's tensors while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from memfit.capture.state.reached_objects import ReachedObjects
from memfit.capture.step_arguments import optimizers_within
from memfit.capture.training_step import TrainingStep
from memfit.distributed.wrapped_models import fsdp_modules
from memfit.errors import MemfitError

MakeFake = Callable[[Tensor], Tensor]


@contextmanager
def fake_tensors_in(step: TrainingStep, make_fake: MakeFake) -> Iterator[None]:
    """Let the modules and optimizers that ``step`` reaches have fake tensors inside the block.

    A step function refers to the model and the optimizers themselves, so that a copy of them would not be run. Tensors
    that it refers to in other ways stay real, and act as constants. Compiled modules run in eager. Gradients are put
    back as they were.
    """
    reached = ReachedObjects([step.model, step.arguments.step, *optimizers_within(step.optimizer)])
    modules = {id(module): module for root in (step.model, *reached.modules) for module in root.modules()}
    parameters = {
        id(each): each for module in modules.values() for each in module._parameters.values() if each is not None
    }
    if any(fsdp_modules(module) for module in modules.values()):
        raise MemfitError(
            "fully_shard keeps state of its own in modules, which fake tensors would stay in; use mode='real', with a "
            "smaller batch where the plain step does not fit the device"
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules.values()):
        raise MemfitError("the tensors of modules of torch.jit cannot be fake ones; use mode='real'")
    has_hooks = any(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        for parameter in parameters.values()
    )
    if has_hooks and step.arguments.step is not None:
        raise MemfitError(
            "parameters have hooks that run in the backward pass, which fake ones would not have; use mode='real'"
        )
    fakes: dict[int, Tensor] = {}

    def fake_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            made = make_fake(tensor)
            # An optimizer and its wrapper show the same parameters, the second one those that are fake already.
            fakes[id(tensor)] = fakes[id(made)] = made
        return fakes[id(tensor)]

    with ExitStack() as stack:
        for parameter in parameters.values():
            stack.callback(setattr, parameter, "grad", parameter.grad)
        for module in modules.values():
            if module._compiled_call_impl is not None:
                stack.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
                module._compiled_call_impl = None
            for held in (module._parameters, module._buffers):
                tensors: dict[str, Any] = held
                stack.callback(tensors.update, dict(tensors))
                tensors.update({name: each if each is None else fake_of(each) for name, each in tensors.items()})
            for entries in vars(module).values():
                # Some modules, as nn.LSTM, have their parameters in lists, too.
                if isinstance(entries, list) and any(id(each) in parameters for each in entries):
                    stack.callback(entries.__setitem__, slice(None), list(entries))
                    entries[:] = [fake_of(each) if id(each) in parameters else each for each in entries]
        for optimizer in {id(each): each for each in reached.optimizers}.values():
            if isinstance(optimizer, torch.optim.Optimizer) and type(optimizer.state) is defaultdict:
                _substitute_in(optimizer, fake_of, stack)
        yield


def _substitute_in(optimizer: torch.optim.Optimizer, fake_of: MakeFake, stack: ExitStack) -> None:
    """Let ``optimizer`` step fake parameters, with fake state, until ``stack`` is closed."""
    state = optimizer.state
    stack.callback(setattr, optimizer, "state", state)
    optimizer.state = defaultdict(
        dict, {fake_of(parameter): _fake_state(known, fake_of) for parameter, known in state.items()}
    )
    for group in optimizer.param_groups:
        stack.callback(group.__setitem__, "params", group["params"])
        group["params"] = [fake_of(parameter) for parameter in group["params"]]


def _fake_state(known: Any, fake_of: MakeFake) -> dict[str, Any]:
    return {name: fake_of(entry) if isinstance(entry, Tensor) else entry for name, entry in known.items()}
