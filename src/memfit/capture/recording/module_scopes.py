"""Follows, during a step, which module is running, and notes the calls of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit.graph.model_profile import ModuleCall
from memfit.graph.names import is_within
from memfit.runtime.applying.forward_wrapping import Forward, Runner, wrap_forward
from memfit.runtime.torch_internals import is_in_backward, outer_saved_tensors_hooks, refuses_saved_tensors_hooks

# Where a call ends that has not returned.
_STILL_OPEN = -1


class ModuleScopes:
    """The path of the module that is running: the empty path for the model itself, None outside it.

    A module that several paths lead to is named by the path that lies in the module that calls it. What happens inside
    a compiled module belongs to the module around it: dynamo must not meet a wrapper.

    ``position`` returns how many ops were recorded so far, ``is_forward`` whether a forward pass is recorded: where a
    checkpoint runs modules once more, they are part of the backward pass.
    """

    def __init__(self, position: Callable[[], int] = lambda: 0, is_forward: Callable[[], bool] = lambda: True) -> None:
        # How often each module was called, in the order of their first calls.
        self.seen: dict[str, int] = {}
        # The outermost modules that a backward pass called, as a checkpoint does to recompute them.
        self.recomputed: dict[str, None] = {}
        # Whether a module that was called from outside returned keys and values for later calls.
        self.returns_cache = False
        self.position = position
        self.is_forward = is_forward
        self._stack: list[str | None] = [None]
        self._is_in_forward = False
        self._calls: list[ModuleCall] = []
        self._num_calls: Counter[str] = Counter()
        self._num_open = 0
        self._num_backward = 0
        self._backward_began = False
        self._hooks_around: object = None

    @property
    def current(self) -> str | None:
        """The path of the innermost module that is running."""
        return self._stack[-1]

    @property
    def calls(self) -> tuple[ModuleCall, ...]:
        """The calls so far that the engine can record: those of modules with one path, with gradients enabled."""
        return tuple(call for call in self._calls if call.end != _STILL_OPEN)

    def backward_runs(self) -> None:
        """Note that the backward pass read something."""
        self._backward_began = True

    @property
    def is_in_forward(self) -> bool:
        """Whether a module is running that no backward pass called, as a checkpoint does to recompute it."""
        return self._is_in_forward

    @contextmanager
    def tracking(self, model: nn.Module) -> Iterator[None]:
        """Follow the modules of ``model`` inside the block."""
        paths: dict[int, list[str]] = {}
        modules: dict[int, nn.Module] = {}
        for path, module in _uncompiled_modules(model, "", ()):
            modules[id(module)] = module
            paths.setdefault(id(module), []).append(path)
        unwrap = [wrap_forward(module, self._runner(paths[key])) for key, module in modules.items()]
        try:
            yield
        finally:
            while unwrap:
                unwrap.pop()()

    def _runner(self, paths: Sequence[str]) -> Runner:
        def run(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            path = paths[0] if len(paths) == 1 else _path_within(paths, self.current)
            self.seen[path] = self.seen.get(path, 0) + 1
            if len(self._stack) == 1:
                self._is_in_forward = not is_in_backward()
                if not self._is_in_forward:
                    self.recomputed[path] = None
                self._begin_pass()
            place = self._begin_call(path) if len(paths) == 1 and self._is_recordable() else None
            self._num_open += place is not None
            self._stack.append(path)
            try:
                result = forward(*args, **kwargs)
                self.returns_cache |= len(self._stack) == 2 and getattr(result, "past_key_values", None) is not None
                return result
            finally:
                self._stack.pop()
                self._is_in_forward &= len(self._stack) > 1
                if place is not None:
                    self._calls[place] = replace(self._calls[place], end=self.position())
                    self._num_open -= 1

        return run

    def _begin_pass(self) -> None:
        self._hooks_around = outer_saved_tensors_hooks()
        if self._backward_began:
            self._backward_began = False
            self._num_backward += 1

    def _is_recordable(self) -> bool:
        """Return whether the engine records calls here: not without gradients, nor under a checkpoint's hooks."""
        return (
            torch.is_grad_enabled()
            and self.is_forward()
            and not refuses_saved_tensors_hooks()
            and outer_saved_tensors_hooks() == self._hooks_around
        )

    def _begin_call(self, path: str) -> int:
        """Note a call that begins; return its place among the calls."""
        if not self._num_open:
            # A forward pass of the model begins, or of a part that is called by itself.
            self._num_calls.clear()
        self._calls.append(ModuleCall(path, self._num_calls[path], self.position(), _STILL_OPEN, self._num_backward))
        self._num_calls[path] += 1
        return len(self._calls) - 1


def _path_within(paths: Sequence[str], around: str | None) -> str:
    """Return the fast_path of ``paths`` inside the module ``around``, or inside the nearest one around that."""
    while around:
        inside = [path for path in paths if is_within(path, around)]
        if inside:
            return min(inside, key=len)
        around = around.rpartition(".")[0]
    return paths[0]


def _uncompiled_modules(module: nn.Module, path: str, around: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with each path that leads to it."""
    if is_compiled(module) or any(module is other for other in around):
        return
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _uncompiled_modules(child, f"{path}.{name}" if path else name, (*around, module))


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of ``module`` go through torch.compile."""
    # torch.compile(module) keeps the original as `_orig_mod`; module.compile() sets `_compiled_call_impl`.
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
