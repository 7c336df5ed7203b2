"""A ledger of live storages: how many bytes of tensors exist at each moment of a step, and the most there were.

It counts what the dispatcher allocates, op by op, and leaves out what the engine hides from dispatch modes, such as
copies in the host's memory where the device is the CPU itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from memfit.calibration.calibrating import UNACCOUNTED
from memfit.graph.model_profile import ModelProfile
from memfit.runtime.call_arguments import is_strided, tensors_in
from memfit.runtime.native_tape import memory_told_to
from memfit.runtime.storage_attribute import StorageAttribute
from memfit.runtime.storage_size import storage_bytes_on
from memfit.runtime.torch_internals import DispatchMode

_ledger_numbers = count()


class StorageLedger(DispatchMode):
    """Counts the bytes of the storages that ops make or meet while it is active, and of those it is told to `track`."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._device = torch.device(device)
        self._entries: StorageAttribute[_Entry] = StorageAttribute(f"ledger_{next(_ledger_numbers)}")

    def track(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of ``tensors`` from now until they die."""
        for tensor in tensors:
            if not is_strided(tensor):
                continue
            storage = tensor.untyped_storage()
            entry = self._entries.of(storage)
            if entry is None:
                # It dies with the storage, and tells the ledger so.
                self._entries.set(storage, _Entry(self, storage_bytes_on(self._device, tensor)))
            else:
                entry.resize(storage_bytes_on(self._device, tensor))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not types:
            # Compiled code makes storages that no op returns; they are met here, as the input of another op.
            self.track(tensors_in((args, kwargs)))
        result = op(*args, **kwargs)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        self.track(output for output in tensors_in(outputs) if type(output) is Tensor)
        return result

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting the storages of ``tensors``, which outlive the ledger."""
        for tensor in tensors:
            if is_strided(tensor):
                self._entries.remove(tensor.untyped_storage())


def ledger_peak(step: Callable[[], object], held: Iterable[Tensor] = ()) -> int:
    """Run ``step`` and return the most bytes of storages that lived during it, those of ``held`` included."""
    ledger, kept = StorageLedger(), list(held)
    ledger.track(kept)
    try:
        with ledger, memory_told_to(lambda made: ledger.track([made])):
            step()
    finally:
        ledger.forget(kept)
    return ledger.peak_bytes


def as_counted_by_ledger(profile: ModelProfile) -> ModelProfile:
    """Return ``profile`` without what only the allocator knows of: what ops hold while they run."""
    ops = tuple(replace(op, workspace_bytes=0) for op in profile.ops)
    return replace(profile, ops=ops, values=tuple(value for value in profile.values if value.name != UNACCOUNTED))


class _Entry:
    __slots__ = ("ledger", "num_bytes")

    def __init__(self, ledger: StorageLedger, num_bytes: int) -> None:
        self.ledger = ledger
        self.num_bytes = 0
        self.resize(num_bytes)

    def resize(self, num_bytes: int) -> None:
        if num_bytes != self.num_bytes:
            self.ledger.live_bytes += num_bytes - self.num_bytes
            self.ledger.peak_bytes = max(self.ledger.peak_bytes, self.ledger.live_bytes)
            self.num_bytes = num_bytes

    def __del__(self) -> None:
        self.ledger.live_bytes -= self.num_bytes
