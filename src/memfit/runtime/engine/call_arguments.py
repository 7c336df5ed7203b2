"""Finds the tensors among an op call's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memfit.runtime.engine.op_rules import OpRule, Treatment, is_random


def tensors_in(arguments: Any) -> list[Tensor]:
    """Return the tensors in ``arguments``, which may be nested lists, tuples and dicts, from left to right."""
    if isinstance(arguments, Tensor):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = arguments.values()
    elif not isinstance(arguments, (list, tuple)):
        return []
    return [tensor for argument in arguments for tensor in tensors_in(argument)]


def written_tensors(rule: OpRule, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that this call writes, by its schema."""
    return tensors_in([kwargs.get(place) if isinstance(place, str) else args[place] for place in rule.written])


def is_repeatable(rule: OpRule, args: Any) -> bool:
    """Return whether this call gives the same bits when run again on the same inputs (and generator state)."""
    if rule.treatment is Treatment.OPAQUE:
        return False
    if rule.deterministic_on_cuda and not rule.draws_random:
        return True
    if not first_tensor(args).is_cuda:
        return True
    # The random numbers of a graph that is being captured are known only when it runs.
    return rule.deterministic_on_cuda and not (is_random(rule, args) and torch.cuda.is_current_stream_capturing())


def first_tensor(args: Any) -> Tensor:
    """Return the first tensor among ``args``, which is on the device that the call runs on."""
    for argument in args:
        if isinstance(argument, Tensor):
            return argument
        if isinstance(argument, (list, tuple)) and argument and isinstance(argument[0], Tensor):
            return argument[0]
    raise AssertionError("an op without a tensor among its arguments is a factory, and factories are not replayed")


def is_strided(tensor: Tensor) -> bool:
    """Return whether the tensor is a storage with a geometry. Nested tensors report a strided layout but have none."""
    return tensor.layout is torch.strided and not tensor.is_nested


def lies_under(storage: torch.UntypedStorage, arguments: Any) -> bool:
    """Return whether one of the tensors in ``arguments`` is over ``storage``."""
    return any(is_strided(tensor) and tensor.untyped_storage() is storage for tensor in tensors_in(arguments))


def covers_its_storage(tensor: Tensor) -> bool:
    """Return whether the tensor's elements cover its storage, each byte once."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return bool(is_dense) and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
