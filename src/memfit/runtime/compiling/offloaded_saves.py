"""Sends what compiled blocks save to the host's memory, and fetches it ahead of their backward passes.

The large tensors that a block saves leave when its forward pass is over, and are given up when that of the next planned
block is. In the backward pass, the reads of one block start the copies of the block before it. The block after the last
one that offloads starts the first copies when its own backward pass begins.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memfit.runtime.engine.call_arguments import is_strided
from memfit.runtime.engine.offloading import HostCopies, OffloadedCopy
from memfit.runtime.engine.planned_modules import Place
from memfit.runtime.engine.storage_attribute import StorageAttribute
from memfit.runtime.engine.values import Geometry, geometry_of, tensor_with
from memfit.runtime.torch_internals import detached_alias

# Smaller tensors are not worth a copy. On a CPU offloading is there to try the rules.
_SMALLEST_BYTES, _SMALLEST_BYTES_ON_CPU = 2**20, 2**10

# Weak, because a storage that somebody holds must not keep what came back of it.
_OFFLOADED: StorageAttribute[weakref.ref[_SharedCopy]] = StorageAttribute("offloaded_save")


class OffloadedSaves:
    """What the blocks of one model offload. ``smallest_bytes`` has, by path, the size from which on tensors leave."""

    def __init__(self, model: nn.Module, smallest_bytes: Mapping[str, int], order: Sequence[str]) -> None:
        self._places = {path: Place(path, model) for path in smallest_bytes}
        self._smallest_bytes = smallest_bytes
        self._in_thread = threading.local()
        last = max((place for place, path in enumerate(order) if path in smallest_bytes), default=len(order))
        self._fetching_path = order[last + 1] if last + 1 < len(order) else None
        self._last_path = order[-1] if order else None

    @contextmanager
    def saving(self, path: str, block: nn.Module) -> Iterator[_BlockSaves]:
        """Run the forward pass of the block at ``path`` inside the block."""
        forward_pass = self._pass_in_which(path)
        saves = _BlockSaves(forward_pass, self._smallest_bytes.get(path), self._places.get(path), block)
        if path in self._smallest_bytes:
            with torch.autograd.graph.saved_tensors_hooks(saves.pack, _unpack):
                yield saves
        else:
            yield saves
        forward_pass.let_go_of_all_but(saves.num_bytes)
        if path == self._last_path:
            forward_pass.let_go_of_all_but(-1)

    def starts_fetching(self, path: str) -> bool:
        """Return whether the first copies back start with the backward pass of the block at ``path``."""
        return path == self._fetching_path

    def _pass_in_which(self, path: str) -> _Pass:
        """Return the forward pass under way: another one once a block comes again."""
        forward_pass: _Pass | None = getattr(self._in_thread, "forward_pass", None)
        if forward_pass is None or path in forward_pass.seen:
            forward_pass = self._in_thread.forward_pass = _Pass()
        forward_pass.seen.add(path)
        return forward_pass


class _Pass:
    """The copies of one forward pass."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.lock = threading.RLock()
        self.copies = HostCopies()
        self.window_bytes = 0

    def let_go_of_all_but(self, num_bytes: int) -> None:
        """Give up what left before the last ``num_bytes``; the device waits for their copies."""
        with self.lock:
            self.copies.release_beyond(num_bytes)

    def fetch_ahead(self) -> None:
        """Start copies back, as far as the window goes."""
        with self.lock:
            self.copies.release_beyond(-1)
            self.copies.fetch_ahead()


class _BlockSaves:
    """What one forward pass of a block saves."""

    def __init__(self, forward_pass: _Pass, smallest_bytes: int | None, place: Place | None, block: nn.Module) -> None:
        self.forward_pass = forward_pass
        self.num_bytes = 0
        self._smallest_bytes = smallest_bytes
        self._place = place
        self._addresses = {tensor.untyped_storage().data_ptr() for tensor in _tensors_of(block)}

    def pack(self, tensor: Tensor) -> Any:
        """Send the storage of ``tensor`` to the host, where it is large enough and not the block's own."""
        assert self._smallest_bytes is not None
        assert self._place is not None
        if not _may_leave(tensor, self._addresses) or tensor.untyped_storage().nbytes() < self._smallest_bytes:
            # Not the tensor itself: it may be an output of the op that saves it, and would keep its own graph alive.
            return tensor.detach()
        forward_pass = self.forward_pass
        with forward_pass.lock:
            known = _OFFLOADED.of(tensor.untyped_storage())
            shared = None if known is None else known()
            if shared is None or shared.forward_pass is not forward_pass or shared.version != tensor._version:
                num_bytes = tensor.untyped_storage().nbytes()
                forward_pass.window_bytes = max(forward_pass.window_bytes, self.num_bytes + num_bytes)
                # Given up when the next block is done, not sooner.
                copy = forward_pass.copies.send(
                    detached_alias(tensor), tensor._version, self._place, "compiled block", 2**62
                )
                if copy is None:
                    return tensor.detach()
                forward_pass.copies.window_bytes = forward_pass.window_bytes
                self.num_bytes += copy.num_bytes
                shared = _SharedCopy(forward_pass, tensor._version, copy)
                _OFFLOADED.set(tensor.untyped_storage(), weakref.ref(shared))
        return _Saved(shared, geometry_of(tensor))


class _SharedCopy:
    """A storage that left. Several tensors over it may have been saved; it comes back once."""

    def __init__(self, forward_pass: _Pass, version: int, copy: OffloadedCopy) -> None:
        self.forward_pass = forward_pass
        self.version = version
        self._copy: OffloadedCopy | None = copy
        self._content: Tensor | None = None

    def content(self) -> Tensor:
        """Return what the storage held, on its device."""
        with self.forward_pass.lock:
            if self._content is None:
                assert self._copy is not None
                self.forward_pass.fetch_ahead()
                self._content = self._copy.fetch()
                self._copy = None
                self.forward_pass.fetch_ahead()
            return self._content


class _Saved:
    """A saved tensor whose storage left."""

    __slots__ = ("geometry", "shared")

    def __init__(self, shared: _SharedCopy, geometry: Geometry) -> None:
        self.shared = shared
        self.geometry = geometry


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, _Saved):
        return tensor_with(saved.geometry, saved.shared.content())
    assert isinstance(saved, Tensor)
    return saved


@contextmanager
def noted_saves(block: nn.Module) -> Iterator[list[int]]:
    """Note the bytes of the storages that may leave among what is saved inside the block, the largest first."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in _tensors_of(block)}
    sizes: dict[int, int] = {}
    noted: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage() if _may_leave(tensor, addresses) else None
        smallest = _SMALLEST_BYTES if tensor.is_cuda else _SMALLEST_BYTES_ON_CPU
        if storage is not None and storage.nbytes() >= smallest:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, _unpack):
        yield noted
    noted += sorted(sizes.values(), reverse=True)


def _may_leave(tensor: Tensor, addresses: set[int]) -> bool:
    """Return whether the tensor is neither one of the block's own nor a leaf that somebody else holds."""
    if type(tensor) is not Tensor or not is_strided(tensor) or (tensor.is_leaf and tensor.requires_grad):
        return False
    return tensor.untyped_storage().data_ptr() not in addresses


def _tensors_of(block: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in (*block.parameters(), *block.buffers()) if is_strided(tensor))
