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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memfit.graph.compiled_data.compiled_blocks import SentTensors
from memfit.runtime.engine.call_arguments import is_strided
from memfit.runtime.engine.offloading import HostCopies
from memfit.runtime.engine.planned_modules import Place
from memfit.runtime.engine.replay import read
from memfit.runtime.engine.replay_records import FetchRecord
from memfit.runtime.engine.storage_attribute import StorageAttribute
from memfit.runtime.engine.values import DroppedUse, DroppedValue, HeldTensor, Source, geometry_of
from memfit.runtime.torch_internals import detached_alias, outer_saved_tensors_hooks, refuses_saved_tensors_hooks

# Smaller tensors are not worth a copy. On a CPU offloading is there to try the rules.
_SMALLEST_BYTES, _SMALLEST_BYTES_ON_CPU = 2**20, 2**10

# The value and its version. Weak, because a storage that somebody holds must not keep what came back of it.
_OFFLOADED: StorageAttribute[tuple[weakref.ref[DroppedValue], int]] = StorageAttribute("offloaded_save")


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
            with saved_tensors_hooks(saves.pack, saves.unpack) if path in self._seen_paths else nullcontext():
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


class _Pass(HostCopies):
    """The copies of one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.lock = threading.RLock()
        # The addresses of storages that a block keeps on the device until its backward pass.
        self.kept: set[int] = set()
        self._widest_bytes = 0

    def widen_window(self, num_bytes: int) -> None:
        """Let the copies of a block that sends ``num_bytes`` be under way at a time."""
        self.window_bytes = self._widest_bytes = max(self._widest_bytes, num_bytes)

    def let_go_of_all_but(self, num_bytes: int) -> None:
        """Give up what left before the last ``num_bytes``; the device waits for their copies."""
        with self.lock:
            self.release_beyond(num_bytes)

    def fetch_ahead(self) -> None:
        """Start copies back, as far as the window goes."""
        with self.lock:
            self.release_beyond(-1)
            super().fetch_ahead()


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
        if not is_strided(tensor):
            return self._held(tensor)
        storage = tensor.untyped_storage()
        with self.forward_pass.lock:
            value = self._value_that_left(tensor) or (self._sent(tensor) if self._leaves(tensor) else None)
            if value is not None:
                return DroppedUse(value, geometry_of(tensor))
            self.forward_pass.kept.add(storage.data_ptr())
            return self._held(tensor)

    def unpack(self, source: Source) -> Tensor:
        """Return what was saved; what left comes back once, and what was sent before it follows."""
        tensor = read(source)
        if isinstance(source, DroppedUse):
            self.forward_pass.fetch_ahead()
        return tensor

    def _held(self, tensor: Tensor) -> HeldTensor:
        # Not the tensor itself: it may be an output of the op that saves it, and would keep its own graph alive.
        return HeldTensor(tensor.detach(), self._place, None)

    def _value_that_left(self, tensor: Tensor) -> DroppedValue | None:
        """Return the content of the tensor's storage, if that left in this pass and was not written since."""
        reference, version = _OFFLOADED.of(tensor.untyped_storage()) or (None, 0)
        value = None if reference is None else reference()
        record = None if value is None or version != tensor._version else value.record
        return value if record is not None and record.offloading is self.forward_pass else None

    def _leaves(self, tensor: Tensor) -> bool:
        """Return whether the tensor is sent: it is one of the first of those sizes, and nobody keeps it."""
        return (
            self._sizes is not None
            and self._num_left > 0
            and _may_leave(tensor, self._addresses)
            and self._sizes.may_have(tensor.untyped_storage().nbytes())
            and tensor.untyped_storage().data_ptr() not in self.forward_pass.kept
        )

    def _sent(self, tensor: Tensor) -> DroppedValue | None:
        forward_pass = self.forward_pass
        # What leaves is given up when the next block is done, not sooner.
        copy = forward_pass.send(detached_alias(tensor), tensor._version, self._place, "compiled block", 2**62)
        if copy is None:
            return None
        self._num_left -= 1
        self.num_bytes += copy.num_bytes
        forward_pass.widen_window(self.num_bytes)
        geometry = geometry_of(tensor)
        value = FetchRecord(0, forward_pass.lock, forward_pass, copy, geometry).add_output(0, geometry)
        _OFFLOADED.set(tensor.untyped_storage(), (weakref.ref(value), tensor._version))
        return value


@contextmanager
def noted_saves(block: nn.Module) -> Iterator[Mapping[int, int]]:
    """Note the bytes of the storages that are saved inside the block and may leave, by their addresses, in order."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in _tensors_of(block)}
    bytes_at: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if _may_leave(tensor, addresses):
            storage = tensor.untyped_storage()
            if storage.nbytes() >= (_SMALLEST_BYTES if tensor.is_cuda else _SMALLEST_BYTES_ON_CPU):
                bytes_at[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    if outer_saved_tensors_hooks() is not None or refuses_saved_tensors_hooks():
        yield bytes_at
        return
    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield bytes_at


def _may_leave(tensor: Tensor, addresses: set[int]) -> bool:
    """Return whether the tensor is neither one of the block's own nor a leaf that somebody else holds."""
    if type(tensor) is not Tensor or not is_strided(tensor) or (tensor.is_leaf and tensor.requires_grad):
        return False
    return tensor.untyped_storage().data_ptr() not in addresses


def _tensors_of(block: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in (*block.parameters(), *block.buffers()) if is_strided(tensor))
