"""Keeps a model, and what it touches, as it is while steps are run on it for measuring."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memfit.runtime.call_arguments import tensors_in, written_tensors
from memfit.runtime.op_rules import Treatment, rule_for
from memfit.runtime.torch_internals import DispatchMode


class KeptState:
    """Puts back, after each step, everything that a training step of ``model`` on ``batch`` changes.

    That is: gradients, the state of random number generators, the plain Python state that modules keep (counters,
    caches, lists), and each tensor that the forward pass writes: buffers, but also weights, the batch, or tensors in
    closures. Which those are is found in the first step, and only they are copied.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self._model = model
        self._leaves = [*model.parameters(), *(tensor for tensor in tensors_in(batch) if tensor.is_leaf)]
        self._writes: _FirstWrites | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Run one step inside the block."""
        gradients = [(leaf, leaf.grad) for leaf in self._leaves]
        attributes = [(vars(module), _snapshot(vars(module))) for module in self._model.modules()]
        python_random = random.getstate()
        for leaf in self._leaves:
            leaf.grad = None
        devices = sorted({leaf.device.index for leaf in self._leaves if leaf.device.type == "cuda"})
        try:
            with torch.random.fork_rng(devices=devices), self._watching_writes():
                yield
        finally:
            random.setstate(python_random)
            for leaf, gradient in gradients:
                leaf.grad = gradient
            for current, snapshot in attributes:
                _restore(current, snapshot)
            assert self._writes is not None
            self._writes.undo()

    @contextmanager
    def _watching_writes(self) -> Iterator[None]:
        """Look for writes in the first step only: later ones may be timed."""
        if self._writes is not None:
            yield
            return
        self._writes = _FirstWrites()
        with self._writes:
            yield


class _FirstWrites(DispatchMode):
    """Copies each tensor from outside the step before the step's first write to it."""

    def __init__(self) -> None:
        super().__init__()
        self._token = object()
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = rule_for(op)
        if rule.treatment is Treatment.VIEW or types:
            return op(*args, **kwargs)
        written = written_tensors(rule, args, kwargs)
        if rule.batch_norm_arguments is not None:
            written = tensors_in([args[place] for place in rule.batch_norm_arguments])
        for tensor in written:
            if self._is_from_outside(tensor):
                whole = _whole_storage_of(tensor)
                self._copies.append((whole, whole.clone()))
        result = op(*args, **kwargs)
        for tensor in tensors_in([written, result]):
            if tensor.layout is torch.strided:
                tensor.untyped_storage()._memfit_step = self._token  # type: ignore[attr-defined]
        return result

    def _is_from_outside(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        return getattr(tensor.untyped_storage(), "_memfit_step", None) is not self._token

    def undo(self) -> None:
        """Write back what the tensors held."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)


def _whole_storage_of(tensor: Tensor) -> Tensor:
    """Return a flat tensor over all of the tensor's storage, with a version counter of its own."""
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        tensor.untyped_storage(), 0, (num_elements,), (1,)
    )


def _snapshot(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each attribute with a copy of the state behind it, where it has one that steps change."""
    return {name: (value, _state_of(value)) for name, value in attributes.items()}


def _state_of(value: Any) -> Any:
    if isinstance(value, (list, dict, set, deque)):
        return value.copy()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return None


def _restore(attributes: dict[str, Any], snapshot: dict[str, tuple[Any, Any]]) -> None:
    for name in attributes.keys() - snapshot.keys():
        del attributes[name]
    for name, (value, state) in snapshot.items():
        attributes[name] = value
        if isinstance(value, list):
            value[:] = state
        elif isinstance(value, deque):
            value.clear()
            value.extend(state)
        elif isinstance(value, (dict, set)):
            value.clear()
            value.update(state)
        elif isinstance(value, torch.Generator):
            value.set_state(state)
        elif isinstance(value, random.Random):
            value.setstate(state)
