"""Finds the tensors in what a model is called with, or returns: any containers and objects, each tensor with its name.

For batches and outputs, of which there is one a step. The arguments of ops are only lists and dicts, and
`call_arguments.tensors_in` reads those faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memfit.runtime.torch_internals import pytree_children


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, from left to right."""
    return [tensor for _, tensor in named_tensors(value)]


def named_tensors(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in ``value``, from left to right, each with the keys, places and attributes that lead to it.

    Looked into are mappings, sequences, what is registered with torch's pytrees, and the attributes of other objects,
    dataclasses or not. Modules, classes, functions and whatever else can be called are not, and no object twice.
    """
    return list(_found_in(value, "", set()))


def _found_in(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    entries = _entries_of(value)
    if entries is None or id(value) in seen:
        return
    seen.add(id(value))
    for key, entry in entries:
        yield from _found_in(entry, f"{name}.{key}" if name else str(key), seen)


def _entries_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return None
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    children = pytree_children(value)
    if children is not None:
        return enumerate(children)
    if isinstance(value, (type, nn.Module)) or callable(value):
        return None
    attributes = getattr(value, "__dict__", None)
    slots = [name for cls in type(value).__mro__ for name in _slots_of(cls) if hasattr(value, name)]
    return [
        *(attributes.items() if isinstance(attributes, dict) else ()),
        *((name, getattr(value, name)) for name in slots),
    ]


def _slots_of(cls: type) -> Iterable[str]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots
