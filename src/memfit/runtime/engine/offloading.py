"""Copies offloaded values to the host's memory and back. All streams, events and host buffers are here.

The offloaded values of one forward pass are numbered in the order in which their copies start. At most a window of
bytes is being copied at a time.

- *To the host.* Right after the op that made a value, a copy of its whole storage starts beside the computation. The
  storage is held until the copies started since exceed the window, or the forward pass ends. The computation then waits
  for the copy, and the memory is freed as that of a dropped value is.
- *Back.* Whenever a dropped value is read that is not on the device, and before any of its records runs, copies back
  are started, the last offloaded value first, as long as the copies that are started and not yet read fit the window.
  A value that is read before its turn is started then.

When memory is taken and freed follows the order in which the host issues ops, on the computing stream, and never the
speed of copies. The device waits for copies; the host never does. Memory that a copy reads or writes returns to the
allocator only after the computing stream has waited for the copy.

A storage that is written during its copy would be copied half old, half new. Recorded writes wait for the copy first.
Other writes are found by the storage's version; reading the value then raises `StaleValueError`.

On the CPU the same rules apply to copies that are synchronous, which serves tests only.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from memfit.errors import StaleValueError
from memfit.runtime.engine.storage_size import storage_bytes_on
from memfit.runtime.engine.values import storage_as_bytes
from memfit.runtime.torch_internals import unseen_by_dispatch_modes

if TYPE_CHECKING:
    from memfit.runtime.engine.planned_modules import Place

_NOTHING = nullcontext()


class HostCopies:
    """The offloaded values of one forward pass."""

    def __init__(self) -> None:
        self.window_bytes = 0
        self._copies: list[weakref.ref[OffloadedCopy]] = []
        self._leaving: deque[_Departure] = deque()
        self._bytes_leaving = 0
        # Numbers of copies: those whose fetch has not started, in order, and those that are fetched but not yet read.
        self._waiting: list[int] = []
        self._ahead: set[int] = set()

    def send(self, tensor: Tensor, version: int, place: Place, op_name: str, window_bytes: int) -> OffloadedCopy | None:
        """Offload the tensor's storage; return None if it cannot be offloaded.

        ``tensor`` must share the version counter of the op's output and have no autograd history; ``version`` is its
        version after the op has returned. The result must be held as long as the value is needed.
        """
        if not _can_leave(tensor):
            return None
        self.window_bytes = window_bytes
        departure = _Departure(tensor, version, f"{place.path}::{op_name}")
        copy = OffloadedCopy(self, len(self._copies), departure)
        self._copies.append(weakref.ref(copy))
        self._waiting.append(len(self._copies) - 1)
        self._leaving.append(departure)
        self._bytes_leaving += departure.num_bytes
        self.release_beyond(window_bytes)
        return copy

    def end_forward(self) -> None:
        """Free all storages that are still being copied."""
        self.release_beyond(-1)

    def release_beyond(self, num_bytes: int) -> None:
        """Free the storages offloaded before the last ``num_bytes``; the computing streams wait for their copies."""
        while self._leaving and self._bytes_leaving > num_bytes:
            departure = self._leaving.popleft()
            self._bytes_leaving -= departure.num_bytes
            departure.release()

    def fetch_ahead(self) -> None:
        """Start fetches, the last offloaded value first, as the window allows. The caller holds the tape's lock."""
        being_fetched = [copy for number in self._ahead if (copy := self._copies[number]()) is not None]
        bytes_ahead = sum(copy.num_bytes for copy in being_fetched)
        # Only the end of the list may grow meanwhile, if another thread is still in the forward pass.
        for position in reversed(range(len(self._waiting))):
            number = self._waiting[position]
            copy = self._copies[number]()
            # Values that are no longer referenced are not fetched.
            if copy is not None:
                bytes_ahead += copy.num_bytes
                if bytes_ahead > self.window_bytes:
                    return
                copy.start()
                self._ahead.add(number)
            del self._waiting[position]

    def note_read(self, number: int) -> None:
        """Note that copy ``number`` was read."""
        if number in self._ahead:
            self._ahead.remove(number)
        else:
            self._waiting.remove(number)


class OffloadedCopy:
    """One value in the host's memory, or being fetched. Deleting it frees its memory on both sides."""

    __slots__ = ("__weakref__", "_arrived", "_buffer", "_departure", "_host", "_number", "_offloading")

    def __init__(self, offloading: HostCopies, number: int, departure: _Departure) -> None:
        self._offloading = offloading
        self._number = number
        self._departure = departure
        self._buffer: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._host: Tensor | None = departure.host_copy()

    @property
    def num_bytes(self) -> int:
        """What the value takes on the device."""
        return self._departure.num_bytes

    def before_write(self, num_counted: int) -> None:
        """Let the storage that left be written, by an op that has counted ``num_counted`` of its writes already."""
        self._departure.settle(num_counted)

    def start(self) -> None:
        """Start the copy back, into memory that the value's own stream could have taken."""
        assert self._host is not None
        self._departure.settle()
        streams = self._departure.streams
        with _NOTHING if streams.main is None else torch.cuda.stream(streams.main):
            self._buffer = torch.empty(self._host.numel(), dtype=torch.uint8, device=self._departure.device)
            self._arrived = _copied_beside(self._buffer, self._host, streams.back)

    def fetch(self) -> Tensor:
        """Return what the storage held, as bytes on its device. It can be had once; the caller has the tape's lock."""
        if self._buffer is None:
            self.start()
        self._departure.refuse_if_torn()
        _wait_for(self._arrived, self._departure.streams)
        self._offloading.note_read(self._number)
        buffer = self._buffer
        assert buffer is not None
        self._host = self._buffer = self._arrived = None
        return buffer

    def __del__(self) -> None:
        # It was being fetched, and will not be read.
        _wait_before_freeing(self._arrived, self._departure.streams)


class _Departure:
    """A storage that is being copied to the host. It must not be freed or written before the copy ends."""

    __slots__ = (
        "_is_settled",
        "_left",
        "_maker",
        "_original",
        "_torn_at",
        "_version",
        "device",
        "num_bytes",
        "streams",
    )

    def __init__(self, tensor: Tensor, version: int, maker: str) -> None:
        self.device = tensor.device
        self.num_bytes = storage_bytes_on(tensor.device, tensor)
        self.streams = _streams_for(tensor.device)
        self._original: Tensor | None = tensor
        self._version = version
        self._maker = maker
        self._left: torch.cuda.Event | None = None
        self._is_settled = False
        # The version at which an early write was found.
        self._torn_at: int | None = None

    def host_copy(self) -> Tensor:
        """Start the copy and return its target."""
        assert self._original is not None
        with unseen_by_dispatch_modes():
            content = storage_as_bytes(self._original)
            host = _host_buffer(content.numel(), is_pinned=self.streams.out is not None)
        self._left = _copied_beside(host, content, self.streams.out)
        return host

    def settle(self, num_counted: int = 0) -> None:
        """Make the computing streams wait for the copy. The copy is torn if the storage was written by now.

        ``num_counted`` writes may already be counted for an op that has yet to run.
        """
        _wait_for(self._left, self.streams)
        if not self._is_settled:
            assert self._original is not None
            if self._original._version > self._version + num_counted:
                self._torn_at = self._original._version
            self._is_settled = True

    def release(self) -> None:
        """Free the storage."""
        self.settle()
        self._original = None

    def refuse_if_torn(self) -> None:
        """Raise if the copy may mix old and new content."""
        if self._torn_at is not None:
            raise torn_value_error(self._maker, self._torn_at, self._version)

    def __del__(self) -> None:
        if self._original is not None:
            _wait_before_freeing(self._left, self.streams)


def torn_value_error(maker: str, torn_at: int, version: int) -> StaleValueError:
    """Return the error for an output of ``maker`` that was written, to version ``torn_at``, during its copy."""
    return StaleValueError(
        f"the output of {maker} was changed while it was being copied to the host's memory (version {torn_at}, was "
        f"{version}), by a write that the plan does not know of, but the backward pass still needs what it held. "
        "Change a clone of it, or plan without offloading it."
    )


class _Streams(NamedTuple):
    """The stream on which a value was made, and those of its copies from and to the device. The CPU has none."""

    main: torch.cuda.Stream | None = None
    out: torch.cuda.Stream | None = None
    back: torch.cuda.Stream | None = None


def _streams_for(device: torch.device) -> _Streams:
    if device.type != "cuda":
        return _Streams()
    return _Streams(torch.cuda.current_stream(device), *_side_streams(device))


@cache
def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _can_leave(tensor: Tensor) -> bool:
    """Return whether the tensor can be offloaded: it has memory, and no graph is being captured."""
    if type(tensor) is not Tensor or tensor.device.type not in ("cpu", "cuda"):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _host_buffer(num_bytes: int, *, is_pinned: bool) -> Tensor:
    try:
        if not is_pinned:
            return _buffer_apart(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except (RuntimeError, MemoryError) as error:
        error.add_note(
            f"memfit was about to offload {num_bytes} bytes to the host's memory, which could not be allocated. "
            "A plan for a smaller host_budget takes less of it"
        )
        raise


def _buffer_apart(num_bytes: int) -> Tensor:
    """Return memory for values offloaded from the CPU itself, which plans do not count, like a GPU's host memory."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(num_bytes), dtype=torch.uint8)


def _copied_beside(target: Tensor, source: Tensor, side: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Start a copy on ``side`` after all work launched on the current stream; return the event of its end.

    The pinned allocator records the copy, so that host buffers can be released at any time.
    """
    if side is None:
        with unseen_by_dispatch_modes():
            target.copy_(source)
        return None
    side.wait_stream(torch.cuda.current_stream(side.device))
    with torch.cuda.stream(side), unseen_by_dispatch_modes():
        target.copy_(source, non_blocking=True)
    done = torch.cuda.Event()
    done.record(side)
    return done


def _wait_for(event: torch.cuda.Event | None, streams: _Streams) -> None:
    """Make the computing streams wait for ``event``: the one on which the value was made, and the current one."""
    if event is None or streams.main is None:
        return
    streams.main.wait_event(event)
    current = torch.cuda.current_stream(streams.main.device)
    if current != streams.main:
        current.wait_event(event)


def _wait_before_freeing(event: torch.cuda.Event | None, streams: _Streams) -> None:
    """Make the stream that owns the memory wait for the copy that may still use it, before the memory is freed."""
    if event is not None and streams.main is not None:
        streams.main.wait_event(event)
