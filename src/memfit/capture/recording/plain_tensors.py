"""Distinguishes tensors that have a storage of their own from subclasses that wrap others."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from memfit.runtime.torch_internals import FakeTensor, detached_alias

_PLAIN = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor's numbers (or, of a fake one, its bytes) lie in its own storage."""
    return type(tensor) in _PLAIN or isinstance(tensor, nn.Parameter)


def only_plain(types: Iterable[type]) -> bool:
    """Return whether an op call whose overriding argument types are ``types`` has plain arguments only."""
    return all(kind is FakeTensor for kind in types)


def plain_alias(tensor: Tensor) -> Tensor:
    """Return a detached alias of a plain tensor, unseen by dispatch modes where that can be."""
    # A fake tensor is fake only to those who go through its mode.
    return tensor.detach() if isinstance(tensor, FakeTensor) else detached_alias(tensor)
