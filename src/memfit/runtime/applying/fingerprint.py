"""The fingerprint of a model: what must agree for a plan to be meant for it."""

from __future__ import annotations

import hashlib

from torch import nn

from memfit.distributed.wrapped_models import bare_model, class_without_fsdp


def fingerprint_of(model: nn.Module) -> str:
    """Return a short text that two models share when their modules and parameters have the same names and shapes.

    A model that is wrapped in DDP or sharded by FSDP2 has that of the model before.
    """
    model = bare_model(model)
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        digest.update(f"{path}:{class_without_fsdp(module).__qualname__}\n".encode())
    # The shape of a DTensor is that of the whole parameter.
    for name, parameter in model.named_parameters():
        digest.update(f"{name}:{tuple(parameter.shape)}\n".encode())
    return digest.hexdigest()[:16]
