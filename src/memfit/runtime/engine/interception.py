"""Intercepts op calls in Python, in the form in which the engine in C++ sees them.

torch runs other ops where a dispatch mode is active: a linear layer adds its bias out of place, the attention of CPUs
with a mask is another kernel. A profile recorded under a mode would then count other calls than a planned step makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.runtime.native import native_library
from memfit.runtime.torch_internals import DispatchMode, detached_alias_below_autograd, is_fake_mode_active, is_tracing


class OpInterceptor(DispatchMode):
    """Receives op calls below autograd and autocast in ``__torch_dispatch__``, in ``with`` blocks.

    It does not act as a dispatch mode, but for fake tensors, without the engine in C++, and inside of another one.
    """

    _is_any_active = False

    def __init__(self) -> None:
        super().__init__()
        self._native: Any = None

    def __enter__(self) -> Any:
        native = native_library.configured_module()
        if native is None or native.is_recording() or OpInterceptor._is_any_active or is_fake_mode_active():
            return super().__enter__()  # type: ignore[no-untyped-call]
        self._native = native
        OpInterceptor._is_any_active = True
        native.intercept(self._handle)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._native is None:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
            return
        self._native.intercept(None)
        OpInterceptor._is_any_active = False
        self._native = None

    def _handle(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # Ops that run while a part of the model is compiled are not ops of the step.
        if is_tracing():
            return op(*args, **kwargs)
        result = self.__torch_dispatch__(op, types, args, kwargs)  # type: ignore[no-untyped-call]
        if result is not NotImplemented:
            return result
        # The op is left to a tensor subclass, such as DTensor in torch 2.11. Its own ops run where no key is
        # intercepted any more, and are seen by a dispatch mode.
        with self._as_dispatch_mode():
            return op(*args, **kwargs)

    @contextmanager
    def _as_dispatch_mode(self) -> Iterator[None]:
        native, self._native = self._native, None
        try:
            with self:
                yield
        finally:
            self._native = native

    @property
    def is_dispatch_mode(self) -> bool:
        """Whether it acts as a dispatch mode now."""
        return self._native is None

    def detached_alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor.detach()`` from within ``__torch_dispatch__``, sharing the tensor's version counter."""
        if self._native is None:
            return detached_alias_below_autograd(tensor)
        alias: torch.Tensor = self._native.detached_alias(tensor)
        return alias
