"""Keeps a model as it is while steps are run on it for measuring."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memfit.runtime.call_arguments import tensors_in

_COPIED_CONTAINERS = (list, dict, set, deque)


@contextmanager
def kept_state(model: nn.Module, batch: Any) -> Iterator[None]:
    """Put back, at the end of the block, everything that a training step changes.

    That is: weights and buffers, gradients, the training mode, random number generators, and the plain Python state
    that modules keep (counters, caches, lists of tensors).
    """
    tensors = [*model.parameters(), *model.buffers()]
    versions_and_copies = [(tensor, tensor._version, tensor.detach().clone()) for tensor in model.buffers()]
    leaves = [*model.parameters(), *(tensor for tensor in tensors_in(batch) if tensor.is_leaf)]
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    attributes = [(module, _snapshot(vars(module))) for module in model.modules()]
    devices = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
    for leaf in leaves:
        leaf.grad = None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient
        for module, snapshot in attributes:
            _restore(vars(module), snapshot)
        with torch.no_grad():
            for buffer, version, copy in versions_and_copies:
                # The version alone would not tell: batch norms write their statistics without raising it.
                if buffer._version != version or not torch.equal(buffer, copy):
                    buffer.copy_(copy)


def _snapshot(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each attribute with a copy of its content where it is a container."""
    return {name: (value, _content(value)) for name, value in attributes.items()}


def _content(value: Any) -> Any:
    return value.copy() if isinstance(value, _COPIED_CONTAINERS) else None


def _restore(attributes: dict[str, Any], snapshot: dict[str, tuple[Any, Any]]) -> None:
    for name in attributes.keys() - snapshot.keys():
        del attributes[name]
    for name, (value, content) in snapshot.items():
        attributes[name] = value
        if isinstance(value, list):
            value[:] = content
        elif isinstance(value, (dict, set, deque)):
            value.clear()
            value.extend(content) if isinstance(value, deque) else value.update(content)
