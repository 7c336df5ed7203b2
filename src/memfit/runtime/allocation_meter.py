"""Measures the memory of a step by the events of torch's allocators.

CUDA's allocator has statistics. That of the CPU reports each allocation and each free to the profiler of the thread,
and to the threads of autograd that work for it. `AllocationMeter` takes the profiler's place, so that nothing changes
about how ops run: no dispatch mode is active. Without a C++ compiler, torch's own profiler records the same events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memfit.errors import MemfitError
from memfit.runtime.engine.call_arguments import is_strided
from memfit.runtime.engine.storage_attribute import StorageAttribute
from memfit.runtime.native.native_build import native_module
from memfit.runtime.torch_internals import profilers_paused, record_free, recorded_memory_events

_CPU = torch.device("cpu")


def allocated_peak(step: Callable[[], object], device: torch.device, held: Iterable[Tensor] = ()) -> int:
    """Run ``step`` and return the most bytes that were allocated on ``device`` during it.

    On CUDA, all of the device's memory counts. Elsewhere it is the storages of ``held``, which exist before the step,
    and all that the step allocates: also inside ops, and in the threads of autograd.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    # Nothing that the step frees may be held here: an exhausted iterator holds nothing.
    held = iter(held)
    if native_module() is None:
        return _run_profiled(step, held).peak_bytes
    with AllocationMeter(held) as meter:
        step()
    return meter.peak_bytes


@contextmanager
def out_of_memory_on_cpu() -> Iterator[None]:
    """Raise ``torch.OutOfMemoryError`` where the CPU's allocator has no memory, for which torch has no error class."""
    try:
        yield
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise torch.OutOfMemoryError(str(error)) from None


def allocated_inside(call: Callable[[], object]) -> tuple[Any, int]:
    """Run ``call`` and return its result and the most bytes that it held on the CPU beyond what is left afterwards."""
    results: list[object] = []
    if native_module() is None:
        allocated = _run_profiled(lambda: results.append(call()), ())
        return results[0], allocated.peak_bytes - allocated.last_bytes
    with AllocationMeter() as meter:
        results.append(call())
        return results[0], meter.peak_bytes - meter.live_bytes


class AllocationMeter:
    """Counts, inside its block, the bytes that torch's CPU allocator allocates in this thread and in its autograd.

    The storages of ``held`` count from the beginning, until they are freed. It needs the engine in C++.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        native = native_module()
        if native is None:
            raise MemfitError("counting allocations as they happen needs a C++ compiler (on Linux)")
        self._meter = native.AllocationMeter()
        self._held = held
        self._stack = ExitStack()

    @property
    def live_bytes(self) -> int:
        """The bytes allocated now; after the block, those at its end."""
        return int(self._meter.live_bytes())

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated since the beginning or the last `restart_peak`."""
        return int(self._meter.peak_bytes())

    def restart_peak(self) -> None:
        """Restart the peak at the bytes allocated now."""
        self._meter.restart_peak()

    def __enter__(self) -> AllocationMeter:
        self._stack.enter_context(profilers_paused())
        self._meter.start()
        for address, num_bytes in _blocks_on_cpu(self._held).items():
            self._meter.hold(address, num_bytes)
        self._held = ()
        return self

    def __exit__(self, *_: object) -> None:
        is_innermost = self._meter.stop()
        self._stack.close()
        if not is_innermost:
            raise MemfitError(
                "a profiler was started during the step and not stopped; memfit measures memory in its place. Stop it "
                "in the step"
            )


def _blocks_on_cpu(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the storages of ``tensors`` that take memory of the CPU, by their addresses."""
    storages = (tensor.untyped_storage() for tensor in tensors if is_strided(tensor) and tensor.device == _CPU)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes() and storage.data_ptr()}


class _Allocated(NamedTuple):
    """What was allocated at most during a call, and after it."""

    peak_bytes: int
    last_bytes: int


class _HeldBytes:
    """Attached to a storage from before the call: lets the profiler record when it is freed."""

    __slots__ = ("num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def __del__(self) -> None:
        record_free(self.num_bytes)


_HELD: StorageAttribute[_HeldBytes] = StorageAttribute("held")


def _run_profiled(call: Callable[[], object], held: Iterable[Tensor]) -> _Allocated:
    """Run ``call`` under torch's profiler, and add up the events that it recorded of the allocator."""
    live_bytes = peak_bytes = _noting_frees(held)
    with recorded_memory_events() as events:
        call()
    sizes: dict[int | None, int] = {}
    for event in events:
        if event.address is None:
            live_bytes += event.num_bytes
            continue
        # Storages from before the call report their own end; an address that is allocated again was freed unreported.
        live_bytes -= sizes.pop(event.address, 0)
        if event.num_bytes > 0:
            sizes[event.address] = event.num_bytes
            live_bytes += event.num_bytes
            peak_bytes = max(peak_bytes, live_bytes)
    return _Allocated(peak_bytes, live_bytes)


def _noting_frees(held: Iterable[Tensor]) -> int:
    """Let the profiler record when the storages of ``held`` are freed; return their bytes."""
    noted: set[int] = set()
    num_bytes = 0
    for tensor in held:
        for address, size in _blocks_on_cpu([tensor]).items():
            if address not in noted:
                _HELD.set(tensor.untyped_storage(), _HeldBytes(size))
                num_bytes += size
            noted.add(address)
    return num_bytes
