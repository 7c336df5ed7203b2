"""What this process holds of a ``DTensor``.

Parameters, gradients and optimizer state of FSDP2 are DTensors. Their ops run on local tensors, which hold the memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a ``DTensor``."""
    return has_dtensor((type(tensor),))


def has_dtensor(types: Iterable[type]) -> bool:
    """Return whether one of ``types`` is that of a ``DTensor``."""
    # Without the import there are no DTensors, and importing it takes a second.
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and any(issubclass(kind, tensors.DTensor) for kind in types)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what this process holds of ``tensor``, over the same memory; ``tensor`` itself if it is no DTensor."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local
