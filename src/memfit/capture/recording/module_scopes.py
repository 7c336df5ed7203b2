"""Knows, during a forward pass, which module is running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from memfit.runtime.forward_wrapping import Forward, Runner, wrap_forward


class ModuleScopes:
    """The path of the module that is running: the empty path for the model itself, None outside it.

    What happens inside a compiled module belongs to the module around it: dynamo must not meet a wrapper.
    """

    def __init__(self) -> None:
        self._stack: list[str | None] = [None]
        self.seen: dict[str, None] = {}

    @property
    def current(self) -> str | None:
        """The path of the innermost module that is running."""
        return self._stack[-1]

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Follow the modules of ``model`` inside the block."""
        unwrap = [wrap_forward(module, self._runner(path)) for path, module in _uncompiled_modules(model, "")]
        try:
            yield
        finally:
            while unwrap:
                unwrap.pop()()

    def _runner(self, path: str) -> Runner:
        def run(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.seen[path] = None
            self._stack.append(path)
            try:
                return forward(*args, **kwargs)
            finally:
                self._stack.pop()

        return run


def _uncompiled_modules(module: nn.Module, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    seen = set() if seen is None else seen
    if id(module) in seen or is_compiled(module):
        return
    seen.add(id(module))
    yield path, module
    for name, child in module.named_children():
        yield from _uncompiled_modules(child, f"{path}.{name}" if path else name, seen)


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of ``module`` go through torch.compile."""
    # torch.compile(module) keeps the original as `_orig_mod`; module.compile() sets `_compiled_call_impl`.
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
