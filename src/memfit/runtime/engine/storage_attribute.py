"""Attributes of storages, kept on the storage itself.

A Python attribute of a storage lives exactly as long as the storage, so that it can never be read from a later storage
at the same address.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

_Content = TypeVar("_Content")


class StorageAttribute(Generic[_Content]):
    """One attribute of storages, by a ``name`` that no other attribute uses."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = f"_memfit_{name}"

    def of(self, storage: torch.UntypedStorage) -> _Content | None:
        """Return the attribute of ``storage``, None if it has none."""
        return getattr(storage, self._name, None)

    def set(self, storage: torch.UntypedStorage, content: _Content) -> None:
        """Set the attribute of ``storage``."""
        setattr(storage, self._name, content)

    def remove(self, storage: torch.UntypedStorage) -> None:
        """Remove the attribute of ``storage``, if it has one."""
        if hasattr(storage, self._name):
            delattr(storage, self._name)
