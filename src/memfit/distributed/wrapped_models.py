"""Models that are wrapped for several processes: DDP puts a module around a model, FSDP2 changes its classes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from memfit.errors import InvalidParameterError

# DDP builds its buckets anew after the first step, FSDP2 allocates its buffers in the first; then nothing changes.
STEPS_UNTIL_SETTLED = 3


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model inside DDP; ``model`` itself if it is not in DDP."""
    while is_ddp(model):
        model = cast(nn.Module, model.module)
    return model


def class_without_fsdp(module: nn.Module) -> type:
    """Return the class of ``module`` as it was before `fully_shard`, which derives another one."""
    kind = type(module)
    fsdp = _fsdp_class()
    if fsdp is None or not issubclass(kind, fsdp):
        return kind
    order = kind.__mro__
    return order[order.index(fsdp) + 1]


def num_warm_up_steps(model: nn.Module) -> int:
    """Return how many steps it takes until each step allocates what the one before it did."""
    return STEPS_UNTIL_SETTLED if ddp_modules(model) or fsdp_modules(model) else 1


def ddp_modules(model: nn.Module) -> list[Any]:
    """Return the DDP modules of ``model``, itself included."""
    return [module for module in model.modules() if is_ddp(module)]


def is_map_of_used_parameters(tensor: Tensor, ddp: Iterable[Any]) -> bool:
    """Return whether ``tensor`` is of a map in which one of the ``ddp`` modules notes what parameters have gradients.

    With a static graph it does so in its first step, and reads the map in all later ones. Only C++ has the map, which
    is known by its size.
    """
    if tensor.dtype is not torch.int32:
        return False
    num_elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    return any(num_elements == sum(each.requires_grad for each in module.module.parameters()) for module in ddp)


def fsdp_modules(model: nn.Module | None) -> list[Any]:
    """Return the modules of ``model`` that `fully_shard` was called on, outer ones before inner ones."""
    fsdp = _fsdp_class()
    return [] if fsdp is None or model is None else [module for module in model.modules() if isinstance(module, fsdp)]


def refuse_fsdp1(model: nn.Module) -> None:
    """Raise where ``model`` has a module of the first FSDP."""
    first = _class_in("torch.distributed.fsdp", "FullyShardedDataParallel")
    if first is not None and any(isinstance(module, first) for module in model.modules()):
        raise InvalidParameterError(
            f"this {type(model).__name__} is wrapped in FullyShardedDataParallel, which keeps the parameters of many "
            "modules in one; memfit works with torch.distributed.fsdp.fully_shard and with DistributedDataParallel"
        )


def warn_of_dtensors(model: nn.Module) -> None:
    """Warn that plans leave the values of ops on DTensors as they are."""
    warnings.warn(
        f"the forward pass of this {type(model).__name__} runs ops on DTensors (tensor parallelism), which are opaque "
        "to memfit: their values count as saved, and no plan recomputes or offloads them. Values of local tensors are "
        "planned",
        stacklevel=2,
    )


def is_ddp(module: Any) -> bool:
    """Return whether ``module`` is a DDP module."""
    ddp = _class_in("torch.nn.parallel", "DistributedDataParallel")
    return ddp is not None and isinstance(module, ddp)


def _fsdp_class() -> type | None:
    return _class_in("torch.distributed.fsdp", "FSDPModule")


def _class_in(module_name: str, name: str) -> type | None:
    """Return a class of torch, None where its module was not imported: then there are no objects of it."""
    found = getattr(sys.modules.get(module_name), name, None)
    return found if isinstance(found, type) else None
