"""Tells tensors that have a storage of their own from subclasses that wrap others."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_PLAIN = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor's numbers (or, of a fake one, its bytes) lie in its own storage."""
    return type(tensor) in _PLAIN or isinstance(tensor, nn.Parameter)


def only_plain(types: Iterable[type]) -> bool:
    """Return whether an op call whose overriding argument types are ``types`` has plain arguments only."""
    return all(kind is FakeTensor for kind in types)
