"""A ledger of live storages: how many bytes of tensors exist at each moment of a step, and the most there were.

It sees what the dispatcher allocates, op by op, so that two runs of a step can be compared to the byte. On CUDA the
allocator's own statistics say more: they include what kernels take for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from memfit.runtime.torch_internals import DispatchMode

_ledger_numbers = count()


class StorageLedger(DispatchMode):
    """Counts the bytes of the storages made while it is active, and of those it was told to `track`."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._device_type = torch.device(device).type
        self._attribute = f"_memfit_ledger_{next(_ledger_numbers)}"

    def track(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of ``tensors`` from now until they die."""
        for tensor in tensors:
            if tensor.device.type != self._device_type or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            if not hasattr(storage, self._attribute):
                # An attribute of the storage dies with it, and tells the ledger so.
                setattr(storage, self._attribute, _Entry(self, storage.nbytes()))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        self.track(output for output in outputs if type(output) is Tensor)
        return result

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting the storages of ``tensors``, which outlive the ledger."""
        for tensor in tensors:
            if tensor.layout is torch.strided and hasattr(tensor.untyped_storage(), self._attribute):
                delattr(tensor.untyped_storage(), self._attribute)


def peak_of(step: Callable[[], object], device: torch.device, held: Sequence[Tensor]) -> int:
    """Run ``step`` and return the most bytes that lived on ``device`` during it.

    On CUDA that is the allocator's word on the whole device; elsewhere, the ledger's on the tensors in ``held`` and all
    that the step makes.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    ledger = StorageLedger(device)
    ledger.track(held)
    with ledger:
        step()
    ledger.forget(held)
    return ledger.peak_bytes


class _Entry:
    __slots__ = ("ledger", "num_bytes")

    def __init__(self, ledger: StorageLedger, num_bytes: int) -> None:
        self.ledger = ledger
        self.num_bytes = num_bytes
        ledger.live_bytes += num_bytes
        ledger.peak_bytes = max(ledger.peak_bytes, ledger.live_bytes)

    def __del__(self) -> None:
        self.ledger.live_bytes -= self.num_bytes
