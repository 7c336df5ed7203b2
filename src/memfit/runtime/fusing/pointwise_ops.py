"""The ops that may be replayed together in one kernel: each element of their result is a function of one of each input.

What a kernel computes must be what torch's own kernels compute, bit for bit. Those of `EXACT` round once, as IEEE 754
has it, so there is one right answer, in all types. The others go through functions of the CUDA math library, which only
those results are trusted of that can all be tried: of types with 65,536 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from memfit.runtime.engine.call_arguments import is_strided
from memfit.runtime.torch_internals import OpOverload

VECTOR = 4
"""The elements that a kernel reads at a time."""
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
TYPES_TRIED_WHOLE = ("bf16", "f16")


class ArgumentRule(IntEnum):
    """What a kernel assumes about an argument."""

    TENSOR = 0
    ANY = 1  # its effect shows in the result's type or layout
    ONE = 2
    OWN_DEVICE = 3  # none, or the device where the tensors are
    TEXT = 4  # becomes part of the op's name in the kernel's program


@dataclass(frozen=True, slots=True)
class PointwiseOp:
    """An op, by its overload, and what it makes of one element, in CUDA, where ``a`` and ``b`` are floats.

    ``expressions`` goes by the text among the arguments, "" where there is none. ``casts`` says that the result may be
    of another type than the argument.
    """

    overload: str
    arguments: tuple[ArgumentRule, ...]
    expressions: dict[str, str]
    is_exact: bool
    casts: bool = False

    @property
    def num_tensors(self) -> int:
        """How many of its arguments are tensors."""
        return self.arguments.count(ArgumentRule.TENSOR)


_T, _ANY, _ONE, _DEVICE, _TEXT = ArgumentRule


def _copy(*others: ArgumentRule) -> PointwiseOp:
    return PointwiseOp("", (_T, *others), {"": "a"}, is_exact=True, casts=True)


def _of_two(expression: str, *others: ArgumentRule) -> PointwiseOp:
    return PointwiseOp("Tensor", (_T, _T, *others), {"": expression}, is_exact=True)


def _of_one(expression: str, *, is_exact: bool = False) -> PointwiseOp:
    return PointwiseOp("", (_T,), {"": expression}, is_exact)


# By the names of rules and plans.
POINTWISE_OPS = {
    "aten._to_copy": _copy(_ANY, _ANY, _DEVICE, _ANY, _ANY, _ANY),
    "aten.clone": _copy(_ANY),
    "aten.add": _of_two("__fadd_rn(a, b)", _ONE),
    "aten.sub": _of_two("__fsub_rn(a, b)", _ONE),
    "aten.mul": _of_two("__fmul_rn(a, b)"),
    "aten.div": _of_two("__fdiv_rn(a, b)"),
    "aten.neg": _of_one("-a", is_exact=True),
    "aten.relu": _of_one("a > 0.0f || a != a ? a : 0.0f"),
    "aten.sigmoid": _of_one("1.0f / (1.0f + expf(-a))"),
    "aten.silu": _of_one("a / (1.0f + expf(-a))"),
    "aten.tanh": _of_one("tanhf(a)"),
    "aten.gelu": PointwiseOp(
        "",
        (_T, _TEXT),
        {
            "none": "a * 0.5f * (1.0f + erff(a * 0.70710678118654752440f))",
            "tanh": "0.5f * a * (1.0f + tanhf(0.79788456080286535588f * (a + 0.044715f * (a * a * a))))",
        },
        is_exact=False,
    ),
}


def pointwise_op(op: object, name: str) -> PointwiseOp | None:
    """Return the entry of ``op``, whose name is ``name``; None if it cannot be part of a kernel."""
    if not isinstance(op, OpOverload):
        return None
    known = POINTWISE_OPS.get(name)
    overload = op._schema.overload_name
    return known if known is not None and overload == known.overload else None


def can_be_fused(op: object, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Return whether a replay of this call may be part of a kernel: what `native/fusing.h` would say, before it runs.

    Used to estimate the time of a replay, so that a difference between the two does no harm.
    """
    known = pointwise_op(op, name)
    if known is None or not isinstance(result, Tensor) or result.numel() == 0 or result.numel() % VECTOR != 0:
        return False
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    if len(tensors) != known.num_tensors or kwargs.get("alpha", 1) != 1:
        return False
    if not all(is_strided(tensor) for tensor in (result, *tensors)):
        return False
    types = list(TYPES.values()) if known.is_exact else [TYPES[name] for name in TYPES_TRIED_WHOLE]
    return result.dtype in types and all(
        tensor.dtype in types
        and (known.casts or result.dtype in (tensor.dtype, torch.float32))
        and tensor.device == result.device
        and _can_be_read(tensor, result)
        for tensor in tensors
    )


def lies_alike(tensor: Tensor, result: Tensor) -> bool:
    """Return whether the elements of both come in the same order, without gaps."""
    return tensor.shape == result.shape and tensor.stride() == result.stride()


def _can_be_read(tensor: Tensor, result: Tensor) -> bool:
    if lies_alike(tensor, result):
        return True
    if tensor.dim() == 0 or not result.is_contiguous() or result.shape[-1] % VECTOR != 0:
        return False
    return tensor.shape[-1] == 1 or tensor.stride(-1) in (0, 1)
