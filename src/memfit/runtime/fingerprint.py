"""The fingerprint of a model: what must agree for a plan to be meant for it."""

from __future__ import annotations

import hashlib

from torch import nn


def fingerprint_of(model: nn.Module) -> str:
    """Return a short text that two models share when their modules and parameters have the same names and shapes."""
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        digest.update(f"{path}:{type(module).__qualname__}\n".encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name}:{tuple(parameter.shape)}\n".encode())
    return digest.hexdigest()[:16]
