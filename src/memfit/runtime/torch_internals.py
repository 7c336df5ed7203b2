"""The few names of torch that are not public, each with the releases it was checked on. Nothing else lives here.

Checked on torch 2.11.0 (CUDA) and 2.13.0 (CPU).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

PackHook = Callable[[torch.Tensor], Any]
UnpackHook = Callable[[Any], torch.Tensor]


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that lets compiled code stay compiled and higher-order operators through."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    # Without this, flex attention or `cond` inside the mode raises instead of reaching it.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # With False, dynamo runs compiled functions in eager inside the mode, and they stay eager afterwards.
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # With True, every __torch_dispatch__ call is wrapped once more in Python, for about a microsecond each.
        return False


def outer_saved_tensors_hooks() -> tuple[PackHook, UnpackHook] | None:
    """Return the saved-tensor hooks in force, or None. torch itself only ever calls the innermost pair."""
    # The argument asks for the hooks even while tracing, which never happens here.
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def in_function_transform() -> bool:
    """Return whether a transform of torch.func is at work (grad, vmap, ...): those refuse saved-tensor hooks."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor over the same storage whose numbers are the negatives of ``tensor``'s."""
    return torch._neg_view(tensor)


def keep_gpu_busy(num_cycles: int) -> None:
    """Let the GPU spin, so that what is launched meanwhile runs back to back afterwards."""
    torch.cuda._sleep(num_cycles)


def detached_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.detach()``, unseen by any dispatch mode. To be called where autograd is in force."""
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


# As it is where no mode, guard or autocast is at work; nothing runs at import that would change it.
_PLAIN_DISPATCH = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def detached_alias_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.detach()`` from below autograd, sharing the tensor's version counter, unseen by dispatch modes.

    Below autograd a plain ``detach()`` gets a counter of its own, and a later write would go unnoticed.
    """
    with torch._C._ForceDispatchKeyGuard(*_PLAIN_DISPATCH):
        return tensor.detach()


class SpareKey:
    """A dispatch key that torch reserves for others and does not use itself, below autograd and above dispatch modes.

    Ops without a kernel at the key fall through it.
    """

    name = "Fake"

    def __init__(self) -> None:
        self._key = torch._C._dispatch_key_parse(self.name)
        self._keys = torch._C.DispatchKeySet(self._key)
        # Higher-order operators have a dispatcher of their own, in Python.
        torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(self._key)
        for operator in torch._ops._higher_order_ops.values():
            operator.fallthrough(self._key)
        self._library = torch.library.Library("_", "IMPL")
        self._library.fallback(torch.library.fallthrough_kernel, self.name)

    @staticmethod
    def take() -> SpareKey | None:
        """Return the key, or None where this torch does not have it or somebody else has taken it."""
        try:
            return SpareKey()
        except (AttributeError, RuntimeError):
            return None

    def on(self) -> AbstractContextManager[object]:
        """Return what switches the key on for this thread inside a block."""
        guard: AbstractContextManager[object] = torch._C._IncludeDispatchKeyGuard(self._key)
        return guard

    def off(self) -> AbstractContextManager[object]:
        """Return what switches the key off for this thread inside a block."""
        guard: AbstractContextManager[object] = torch._C._ExcludeDispatchKeyGuard(self._keys)
        return guard


def all_op_names() -> list[str]:
    """Return the names of all ops that are registered, such as "aten::add_.Tensor"."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names


def has_python_key(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's ops are handled in Python: a subclass with ``__torch_dispatch__``."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))
