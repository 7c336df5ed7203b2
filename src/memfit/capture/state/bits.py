"""Compares tensors bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether both have one shape, one type and the same bits: NaN equals NaN, and 0 is not -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
