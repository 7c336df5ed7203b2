"""Streams that only take notes of who waits for whom, beneath either engine's way to the host and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfit.runtime.engine import offloading
from memfit.runtime.engine.offloading import OffloadedCopy, torn_value_error
from memfit.runtime.engine.replay import gather, stale_value_error
from memfit.runtime.native import native_build, native_library
from memfit.runtime.native.native_build import native_module

NAMES = ("main", "out", "back", "other")
# What CUDA's allocator hands out at least: a window has room for as many values with either engine.
VALUE_BYTES = 512
CPU = torch.device("cpu")


class NotedStreams(ABC):
    """The streams of one device. Values are made, written and read through it: only the engine knows the device."""

    @abstractmethod
    def since(self) -> list[str]:
        """Return what was launched since that was last asked for, in the host's order."""

    @abstractmethod
    def memory(self) -> list[str]:
        """Return which memory was taken since that was last asked for: pinned on the host, or for which stream."""

    @abstractmethod
    def use(self, name: str) -> None:
        """Compute on another stream from now on."""

    @abstractmethod
    def fill_host(self) -> None:
        """Let the host have no memory to pin from now on."""

    @abstractmethod
    def value(self, number: int) -> Tensor:
        """Return a new tensor of `VALUE_BYTES` on the device that is full of ``number``."""

    @abstractmethod
    def write(self, tensor: Tensor) -> None:
        """Add one to what ``value`` returned, and count the write."""

    @abstractmethod
    def content(self, copy: OffloadedCopy) -> set[float]:
        """Fetch the value, and return the numbers in it."""


class _Stream:
    def __init__(self, streams: StreamsOfPython, name: str) -> None:
        self.streams, self.name, self.device = streams, name, CPU

    def wait_stream(self, other: _Stream) -> None:
        self.streams.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: _Event) -> None:
        self.streams.notes.append(f"{self.name} waits for {event.name}")


class _Event:
    name = ""

    def record(self, stream: _Stream) -> None:
        self.name = f"copy {stream.streams.num_copies} {stream.name}"
        stream.streams.num_copies += 1
        stream.streams.notes.append(self.name)


class StreamsOfPython(NotedStreams):
    """In the place of those that torch has in Python, with the CPU for a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[str] = []
        self.num_copies = 0
        self._memory: list[str] = []
        self._is_host_full = False
        self._streams = {name: _Stream(self, name) for name in NAMES}
        self._current = self._streams["main"]
        self._empty = torch.empty
        monkeypatch.setattr(torch, "empty", self._noted_empty)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self._current)
        monkeypatch.setattr(torch.cuda, "Event", _Event)
        sides = self._streams["out"], self._streams["back"]
        monkeypatch.setattr(offloading, "_streams_for", lambda _: offloading._Streams(self._current, *sides))

    @contextmanager
    def _on(self, stream: _Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def _noted_empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if pin_memory and self._is_host_full:
            raise RuntimeError("CUDA error: out of memory")
        # Tensors over other memory are made from empty ones, which take none.
        if args[0]:
            self._memory.append("pinned" if pin_memory else self._current.name)
        return self._empty(*args, **kwargs)

    def since(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes

    def memory(self) -> list[str]:
        memory, self._memory = self._memory, []
        return memory

    def use(self, name: str) -> None:
        self._current = self._streams[name]

    def fill_host(self) -> None:
        self._is_host_full = True

    def value(self, number: int) -> Tensor:
        return torch.full((VALUE_BYTES // 4,), float(number))

    def write(self, tensor: Tensor) -> None:
        tensor.add_(1)

    def content(self, copy: OffloadedCopy) -> set[float]:
        return set(copy.fetch().view(torch.float32).tolist())


class StreamsOfCpp(NotedStreams):
    """Those of a CUDA device that torch is made to believe in. Nothing is captured, unless it is told to."""

    def __init__(self, device: Any) -> None:
        self.is_capturing = False
        self._device = device

    def since(self) -> list[str]:
        notes: list[str] = self._device.taken_notes()
        return notes

    def memory(self) -> list[str]:
        memory: list[str] = self._device.taken_memory()
        return memory

    def use(self, name: str) -> None:
        self._device.use_stream(NAMES.index(name))

    def fill_host(self) -> None:
        self._device.fill_host()

    def break_device(self) -> None:
        """Let whatever waits for an event from now on raise an error."""
        self._device.break_device()

    def value(self, number: int) -> Tensor:
        tensor: Tensor = self._device.on_device(torch.full((VALUE_BYTES // 4,), float(number)))
        return tensor

    def write(self, tensor: Tensor) -> None:
        self._device.on_host(tensor).add_(1)
        torch.autograd.graph.increment_version(tensor)

    def content(self, copy: OffloadedCopy) -> set[float]:
        return set(self._device.on_host(copy.fetch()).view(torch.float32).tolist())


@contextmanager
def logged_streams_of(engine: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[NotedStreams]:
    """Let ``engine`` offload by streams that take notes, and return them."""
    if engine == "Python":
        yield StreamsOfPython(monkeypatch)
        return
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device, which would be hidden")
    native, device = native_module(), _pretended_device()
    pretence, streams = device.Pretence(), StreamsOfCpp(device)
    others = stale_value_error, torn_value_error, gather, nn.Parameter
    native.configure(native_library._rule_of, lambda: streams.is_capturing, *others)
    yield streams
    native.configure(native_library._rule_of, torch.cuda.is_current_stream_capturing, *others)
    del pretence


@cache
def _pretended_device() -> Any:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(native_build, "_SOURCES", Path(__file__).with_name("pretended_device"))
        patches.setattr(native_build, "_MODULE", "memfit_pretended_device")
        return native_build._loaded(native_build._built())
