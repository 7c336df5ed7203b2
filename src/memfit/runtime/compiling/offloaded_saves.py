"""Sends what compiled blocks save to the host's memory, and fetches it ahead of their backward passes.

The first large tensors that a block saves leave when its forward pass is over, and are given up when that of the next
planned block is. In the backward pass, the reads of one block start the copies of the blocks before it, as many bytes
ahead as the largest block sends. The block after the last one that offloads starts the first copies when its own
backward pass begins. Later blocks that save a storage which left refer to its copy too; otherwise they would keep it on
the device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import StaleValueError
from memfit.graph.compiled_data.compiled_blocks import SentTensors
from memfit.runtime.engine.call_arguments import is_strided
from memfit.runtime.engine.offloading import HostCopies, OffloadedCopy
from memfit.runtime.engine.planned_modules import Place
from memfit.runtime.engine.storage_attribute import StorageAttribute
from memfit.runtime.engine.values import Geometry, geometry_of, tensor_with
from memfit.runtime.torch_internals import detached_alias, outer_saved_tensors_hooks, refuses_saved_tensors_hooks

# Smaller tensors are not worth a copy. On a CPU offloading is there to try the rules.
_SMALLEST_BYTES, _SMALLEST_BYTES_ON_CPU = 2**20, 2**10

# Weak, because a storage that somebody holds must not keep what came back of it.
_OFFLOADED: StorageAttribute[weakref.ref[_SharedCopy]] = StorageAttribute("offloaded_save")


class OffloadedSaves:
    """What the blocks of one model offload. ``sent`` has, by path, which of the tensors that a block saves leave."""

    def __init__(self, model: nn.Module, sent: Mapping[str, SentTensors], order: Sequence[str]) -> None:
        self._places = {path: Place(path, model) for path in order}
        self._sent = sent
        self._in_thread = threading.local()
        offloading = [place for place, path in enumerate(order) if path in sent]
        self._fetching_path = order[offloading[-1] + 1] if offloading and offloading[-1] + 1 < len(order) else None
        # What a block before them kept does not leave either: it would free nothing.
        self._seen_paths = frozenset(order) if offloading else frozenset()
        self._last_path = order[-1] if order else None

    @contextmanager
    def saving(self, path: str, block: nn.Module) -> Iterator[_BlockSaves | None]:
        """Run the forward pass of the block at ``path`` inside the block. Other people's hooks come first."""
        if outer_saved_tensors_hooks() is not None or refuses_saved_tensors_hooks():
            yield None
            return
        forward_pass = self._pass_in_which(path)
        saves = _BlockSaves(forward_pass, self._sent.get(path), self._places[path], block)
        try:
            with _hooked(saves.pack if path in self._seen_paths else None):
                yield saves
        except BaseException:
            self._end_pass(forward_pass)
            raise
        forward_pass.let_go_of_all_but(saves.num_bytes)
        if path == self._last_path:
            self._end_pass(forward_pass)

    def starts_fetching(self, path: str) -> bool:
        """Return whether the first copies back start with the backward pass of the block at ``path``."""
        return path == self._fetching_path

    def _pass_in_which(self, path: str) -> _Pass:
        """Return the forward pass under way: another one once a block comes again."""
        forward_pass: _Pass | None = getattr(self._in_thread, "forward_pass", None)
        if forward_pass is not None and path in forward_pass.seen:
            # It ended early: blocks were skipped, or the model was left by an exception outside blocks.
            self._end_pass(forward_pass)
            forward_pass = None
        if forward_pass is None:
            forward_pass = self._in_thread.forward_pass = _Pass()
        forward_pass.seen.add(path)
        return forward_pass

    def _end_pass(self, forward_pass: _Pass) -> None:
        forward_pass.let_go_of_all_but(-1)
        self._in_thread.forward_pass = None


def _hooked(pack: Callable[[Tensor], Any] | None) -> AbstractContextManager[object]:
    return nullcontext() if pack is None else torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


class _Pass:
    """The copies of one forward pass."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.lock = threading.RLock()
        self.copies = HostCopies()
        # The addresses of storages that a block keeps on the device until its backward pass.
        self.kept: set[int] = set()
        self._window_bytes = 0

    def widen_window(self, num_bytes: int) -> int:
        """Let the copies of a block that sends ``num_bytes`` be under way at a time; return how many bytes may be."""
        self._window_bytes = max(self._window_bytes, num_bytes)
        return self._window_bytes

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
    """What one forward pass of a block saves. Without ``sent``, the block sends nothing by itself."""

    def __init__(self, forward_pass: _Pass, sent: SentTensors | None, place: Place, block: nn.Module) -> None:
        self.forward_pass = forward_pass
        self.num_bytes = 0
        self._sizes = sent
        self._num_left = 0 if sent is None else sent.most
        self._place = place
        self._addresses = {tensor.untyped_storage().data_ptr() for tensor in _tensors_of(block)}

    def pack(self, tensor: Tensor) -> Any:
        """Refer to the storage's copy on the host: one that is there already, or one that is sent now."""
        forward_pass = self.forward_pass
        with forward_pass.lock:
            copy = _OFFLOADED.of(tensor.untyped_storage()) if is_strided(tensor) else None
            shared = None if copy is None else copy()
            if shared is None or shared.forward_pass is not forward_pass or shared.version != tensor._version:
                shared = self._sent(tensor) if self._leaves(tensor) else None
            if shared is not None:
                return _Saved(shared, geometry_of(tensor))
            if is_strided(tensor):
                forward_pass.kept.add(tensor.untyped_storage().data_ptr())
            return _Kept(tensor, self._place)

    def _leaves(self, tensor: Tensor) -> bool:
        """Return whether the tensor is sent: it is one of the first of those sizes, and nobody keeps it."""
        return (
            self._sizes is not None
            and self._num_left > 0
            and _may_leave(tensor, self._addresses)
            and self._sizes.may_have(tensor.untyped_storage().nbytes())
            and tensor.untyped_storage().data_ptr() not in self.forward_pass.kept
        )

    def _sent(self, tensor: Tensor) -> _SharedCopy | None:
        copies = self.forward_pass.copies
        # What leaves is given up when the next block is done, not sooner.
        copy = copies.send(detached_alias(tensor), tensor._version, self._place, "compiled block", 2**62)
        if copy is None:
            return None
        self._num_left -= 1
        self.num_bytes += copy.num_bytes
        copies.window_bytes = self.forward_pass.widen_window(self.num_bytes)
        shared = _SharedCopy(self.forward_pass, tensor._version, copy)
        _OFFLOADED.set(tensor.untyped_storage(), weakref.ref(shared))
        return shared


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


class _Kept:
    """A saved tensor that stays. Under hooks, autograd does not notice by itself that it was written over."""

    __slots__ = ("place", "tensor", "version")

    def __init__(self, tensor: Tensor, place: Place) -> None:
        # Not the tensor itself: it may be an output of the op that saves it, and would keep its own graph alive.
        self.tensor = tensor.detach()
        self.version = -1 if tensor.is_inference() else tensor._version
        self.place = place

    def content(self) -> Tensor:
        """Return the tensor, which must be as it was saved."""
        if self.version >= 0 and self.tensor._version != self.version:
            name = self.place.owned_name(self.tensor) or "a tensor"
            raise StaleValueError(
                f"{name} that the compiled block {self.place.path!r} saved for its backward pass was changed in place "
                f"since (version {self.tensor._version}, was {self.version}). Change a clone of it, or change it after "
                "the backward pass"
            )
        return self.tensor


def _unpack(saved: _Saved | _Kept) -> Tensor:
    return tensor_with(saved.geometry, saved.shared.content()) if isinstance(saved, _Saved) else saved.content()


class NotedSaves:
    """What was saved: ``sizes`` of storages that may leave, in order, without those that were noted before."""

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] = ()
        self._bytes_at: dict[int, int] = {}

    def note(self, storage: torch.UntypedStorage) -> None:
        """A tensor of this storage is saved."""
        self._bytes_at[storage.data_ptr()] = storage.nbytes()

    def end(self, noted_before: set[int]) -> None:
        """All is saved."""
        self.sizes = tuple(size for address, size in self._bytes_at.items() if address not in noted_before)
        noted_before.update(self._bytes_at)

    def bytes_at(self, addresses: Iterable[int]) -> int:
        """Return the bytes of the saved storages at these addresses."""
        return sum(self._bytes_at.get(address, 0) for address in set(addresses))

    def places_among(self, addresses: Sequence[int], also_in: Set[int] | None = None) -> frozenset[int]:
        """Return the places of the saved storages among ``addresses``."""
        return frozenset(
            place
            for place, address in enumerate(addresses)
            if address in self._bytes_at and (also_in is None or address in also_in)
        )


@contextmanager
def noted_saves(block: nn.Module, noted_before: set[int]) -> Iterator[NotedSaves]:
    """Note which storages that may leave are saved inside the block.

    ``noted_before`` has the addresses of those that blocks before it saved, which leave with these blocks.
    """
    addresses = {tensor.untyped_storage().data_ptr() for tensor in _tensors_of(block)}
    noted = NotedSaves()

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage() if _may_leave(tensor, addresses) else None
        smallest = _SMALLEST_BYTES if tensor.is_cuda else _SMALLEST_BYTES_ON_CPU
        if storage is not None and storage.nbytes() >= smallest:
            noted.note(storage)
        return tensor.detach()

    if outer_saved_tensors_hooks() is not None or refuses_saved_tensors_hooks():
        yield noted
        return
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield noted
    noted.end(noted_before)


def _may_leave(tensor: Tensor, addresses: set[int]) -> bool:
    """Return whether the tensor is neither one of the block's own nor a leaf that somebody else holds."""
    if type(tensor) is not Tensor or not is_strided(tensor) or (tensor.is_leaf and tensor.requires_grad):
        return False
    return tensor.untyped_storage().data_ptr() not in addresses


def _tensors_of(block: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in (*block.parameters(), *block.buffers()) if is_strided(tensor))
