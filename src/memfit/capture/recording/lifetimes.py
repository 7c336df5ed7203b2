"""Reports when storages are freed, by marks on them, and when autograd releases a save, by handles in its place."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from memfit.runtime.torch_internals import num_references


class LifetimeWatcher(Protocol):
    """Is called when a lifetime ends."""

    def storage_died(self, number: int) -> None:
        """Note that a storage is gone."""
        ...

    def save_released(self, number: int) -> None:
        """Note that autograd released a save."""
        ...


class StorageMark:
    """Attached to a storage: which one it is, and the value that it holds now. Reports when the storage is freed."""

    __slots__ = ("storage", "value", "watcher")

    def __init__(self, watcher: LifetimeWatcher, storage: int) -> None:
        self.watcher = watcher
        self.storage = storage
        self.value = -1

    def __del__(self) -> None:
        self.watcher.storage_died(self.storage)


class SaveHandle:
    """What autograd holds in the place of a saved tensor. Reports when it is released."""

    __slots__ = ("number", "tensor", "watcher")

    def __init__(self, watcher: LifetimeWatcher, number: int, tensor: Tensor) -> None:
        self.watcher = watcher
        self.number = number
        self.tensor = tensor

    def __del__(self) -> None:
        self.watcher.save_released(self.number)


class SavedStorages:
    """The storages that autograd's saves hold, and whether anything else does.

    Each save holds one tensor of its own over the storage. Where no other tensor is left, the program has let go of the
    storage, and only autograd still needs it.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._num_saves: dict[int, int] = {}

    def add(self, number: int, storage: torch.UntypedStorage) -> None:
        """Note one more save of the storage of this ``number``."""
        self._storages[number] = storage
        self._num_saves[number] = self._num_saves.get(number, 0) + 1

    def release(self, number: int | None) -> None:
        """Note that a save of this storage is being released."""
        if number not in self._storages:
            return
        self._num_saves[number] -= 1
        if not self._num_saves[number]:
            self._forget(number)

    def take_those_held_by_saves_alone(self) -> list[int]:
        """Return the numbers of the storages that nothing but saves holds, and follow these no longer."""
        found = [
            number
            for number, storage in self._storages.items()
            # The storage object itself is one reference.
            if num_references(storage) <= 1 + self._num_saves[number]
        ]
        for number in found:
            self._forget(number)
        return found

    def clear(self) -> None:
        """Follow no storage any longer."""
        self._storages.clear()
        self._num_saves.clear()

    def _forget(self, number: int) -> None:
        del self._storages[number], self._num_saves[number]
