"""What tells of an end: marks that die with a storage, and handles that die when autograd lets go of a save."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LifetimeWatcher(Protocol):
    """Hears of ends as they happen."""

    def storage_died(self, number: int) -> None:
        """Note that a storage is gone."""
        ...

    def save_released(self, number: int) -> None:
        """Note that autograd let go of a save."""
        ...


class StorageMark:
    """Attached to a storage: which one it is, and the value that it holds now. Tells when the storage dies."""

    __slots__ = ("storage", "value", "watcher")

    def __init__(self, watcher: LifetimeWatcher, storage: int) -> None:
        self.watcher = watcher
        self.storage = storage
        self.value = -1

    def __del__(self) -> None:
        self.watcher.storage_died(self.storage)


class SaveHandle:
    """What autograd holds in the place of a saved tensor. Tells when it is released."""

    __slots__ = ("number", "tensor", "watcher")

    def __init__(self, watcher: LifetimeWatcher, number: int, tensor: Tensor | None) -> None:
        self.watcher = watcher
        self.number = number
        self.tensor = tensor

    def __del__(self) -> None:
        self.watcher.save_released(self.number)
