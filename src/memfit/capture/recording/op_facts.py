"""Reads from an op call what decides how long it takes: shapes, strides, types, FLOPs and the bytes it moves.

Also whether the host has to wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from memfit.capture.recording.step_recording import FusedFacts, OpFacts
from memfit.runtime.engine.call_arguments import is_strided, tensors_in
from memfit.runtime.engine.op_rules import OpRule
from memfit.runtime.fusing.pointwise_ops import can_be_fused, lies_alike

# They read as much of their table as they return, however long it is.
_GATHERS = {"aten.embedding", "aten.index", "aten.index_select", "aten.gather", "aten._unsafe_index", "aten.slice_copy"}


# What these ops return, or how large that is, only the device knows.
_TAGS_OF_ANSWERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

NOTHING_KNOWN = OpFacts(None, 0, 0, None)


def facts_of(
    op: Any,
    rule: OpRule,
    args: Any,
    kwargs: Any,
    results: Iterable[Any],
    flops: int,
    fused: FusedFacts | None = None,
) -> OpFacts:
    """Return the facts of a call that gave ``results``."""
    if rule.name.startswith(("aten.empty", "aten.new_empty")):
        return NOTHING_KNOWN
    inputs = tensors_in((args, kwargs))
    outputs = tensors_in(list(results))
    made_bytes = sum(_touched_bytes(tensor) for tensor in outputs)
    read_bytes = sum(_touched_bytes(tensor) for tensor in inputs)
    if rule.name in _GATHERS:
        read_bytes = min(read_bytes, made_bytes)
    dtype = next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), None)
    is_answer = not _TAGS_OF_ANSWERS.isdisjoint(getattr(op, "tags", ())) or _leave_the_device(inputs, outputs)
    return OpFacts(signature_of(rule, args, kwargs), flops, made_bytes + read_bytes, dtype, is_answer, fused)


def fused_facts_of(
    op: Any, rule: OpRule, args: Any, kwargs: Any, results: Sequence[Any], values: Sequence[int | None]
) -> FusedFacts | None:
    """Return the facts of a call that may be replayed in one kernel with others, None for others.

    ``values`` are what the tensors hold that it reads.
    """
    if len(results) != 1 or not can_be_fused(op, rule.name, args, kwargs, results[0]):
        return None
    result = results[0]
    inputs = tensors_in((args, kwargs))
    return FusedFacts(
        reads=tuple((value, _touched_bytes(tensor)) for value, tensor in zip(values, inputs, strict=True)),
        made_bytes=_touched_bytes(result),
        gains_alone=any(tensor.dtype != result.dtype or not lies_alike(tensor, result) for tensor in inputs),
    )


def _leave_the_device(inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> bool:
    return any(tensor.is_cpu for tensor in outputs) and not all(tensor.is_cpu for tensor in inputs)


def signature_of(rule: OpRule, args: Any, kwargs: Any) -> Any:
    """Return something hashable that two calls share when they run the same kernel on the same geometry."""
    return rule.name, _signature(args), _signature(tuple(sorted(kwargs.items())) if kwargs else ())


def _signature(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        if not is_strided(argument):
            return argument.layout, argument.numel() if argument.is_nested else argument.shape, argument.dtype
        return argument.shape, argument.stride(), argument.dtype, argument.device
    if isinstance(argument, (list, tuple)):
        return tuple(_signature(item) for item in argument)
    if isinstance(argument, (int, str, torch.dtype, torch.device, torch.memory_format)) or argument is None:
        return argument
    return type(argument)


def _touched_bytes(tensor: Tensor) -> int:
    num_bytes = tensor.numel() * tensor.element_size()
    if not is_strided(tensor):
        return num_bytes
    # An expanded tensor has more elements than there are numbers behind it.
    return min(num_bytes, tensor.untyped_storage().nbytes())
