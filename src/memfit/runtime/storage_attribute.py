"""What is known of a storage, kept on the storage itself.

A Python attribute of a storage lives exactly as long as the storage, so that what is known of one can never be read off
another that was given the same address later.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

_Known = TypeVar("_Known")


class StorageAttribute(Generic[_Known]):
    """One attribute of storages. Whoever makes it is the only one to use its ``name``."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = f"_memfit_{name}"

    def of(self, storage: torch.UntypedStorage) -> _Known | None:
        """Return what is known of ``storage``, None where that is nothing."""
        return getattr(storage, self._name, None)

    def set(self, storage: torch.UntypedStorage, known: _Known) -> None:
        """Know this of ``storage``, in place of anything older."""
        setattr(storage, self._name, known)

    def remove(self, storage: torch.UntypedStorage) -> None:
        """Know nothing of ``storage`` any more."""
        if hasattr(storage, self._name):
            delattr(storage, self._name)
