"""Chains of pointwise ops as models have them, and numbers to run them on."""

from __future__ import annotations

import torch
from torch import Tensor


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """A transformer's root-mean-square norm, as it is written in most models."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (wide * scale).to(x.dtype)
