"""The values of a tape: tensors that it holds, and dropped values with the records that restore them.

References decide when memory is freed; the garbage collector is not involved:

    autograd ──▶ DroppedUse ──▶ DroppedValue ──▶ ReplayRecord ──▶ its sources: DroppedUse, HeldTensor ──▶ …
    storage  ──▶ StorageNote ──▶ DroppedValue                             (while the forward pass runs)

Whatever still needs a dropped value refers to it: autograd's graph, and the records that have yet to run. A record that
has run is freed together with its sources. So a replayed value lives exactly until its last reader is done, and there
are no cycles through storages.

An offloaded value is a dropped one whose record has no sources and fetches it from the host (`offloading.py`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memfit.runtime.engine.storage_attribute import StorageAttribute
from memfit.runtime.torch_internals import negated_view

if TYPE_CHECKING:
    from memfit.runtime.engine.planned_modules import Place
    from memfit.runtime.engine.replay_records import ReplayRecord


# How a tensor reads its storage: size, stride, offset, dtype, is_conj, is_neg. A plain tuple, because one is made for
# every tensor that is recorded.
Geometry = tuple[torch.Size, tuple[int, ...], int | torch.SymInt, torch.dtype, bool, bool]


def geometry_of(tensor: Tensor) -> Geometry:
    """Return the geometry of ``tensor``."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def tensor_with(geometry: Geometry, base: Tensor) -> Tensor:
    """Return the tensor of that geometry over the storage of ``base``; ``base`` itself where it is that tensor."""
    size, stride, offset, dtype, is_conj, is_neg = geometry
    if base.dtype != dtype:
        tensor = torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), offset, size, stride)
    elif base.shape == size and base.stride() == stride and base.storage_offset() == offset:
        tensor = base
    else:
        tensor = base.as_strided(size, stride, offset)
    if is_conj != tensor.is_conj():
        tensor = tensor.conj()
    if is_neg != tensor.is_neg():
        tensor = negated_view(tensor)
    return tensor


def storage_as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's whole storage as bytes; the tensor's own elements may cover only a part."""
    num_bytes = tensor.untyped_storage().nbytes()
    return tensor_with((torch.Size((num_bytes,)), (1,), 0, torch.uint8, False, False), tensor)


class HeldTensor:
    """A tensor kept for the backward pass, with the version it had: it must not have changed when it is read.

    ``place`` and ``op_name`` name its reader in error messages; without ``op_name``, the reader is autograd.
    """

    __slots__ = ("__weakref__", "op_name", "place", "tensor", "version")

    def __init__(self, tensor: Tensor, place: Place, op_name: str | None) -> None:
        self.tensor = tensor
        # An inference tensor has no version, and autograd refuses to save it.
        self.version = -1 if tensor.is_inference() else tensor._version
        self.place = place
        self.op_name = op_name

    def num_writes(self) -> int:
        """Return the number of counted writes to the tensor since."""
        return self.tensor._version - self.version if self.version >= 0 else 0

    def replace(self, copy: Tensor) -> None:
        """Hold ``copy``, which equals what is held now, because the original is about to be written."""
        self.tensor = copy
        self.version = copy._version


class DroppedValue:
    """The content of a freed storage: ``record`` restores it, and from then on ``tensor`` is the content."""

    __slots__ = ("__weakref__", "geometry", "num_uses", "record", "tensor")

    def __init__(self, record: ReplayRecord, geometry: Geometry) -> None:
        self.record: ReplayRecord | None = record
        self.tensor: Tensor | None = None
        self.geometry = geometry
        self.num_uses = 0

    def fill(self, tensor: Tensor) -> None:
        """Take the replayed ``tensor`` as this value and give up the record."""
        size, stride, offset, dtype, _, _ = self.geometry
        if tensor.dtype != dtype or tensor.shape != size:
            raise RuntimeError(
                f"an op gave a tensor of type {dtype} and size {tuple(size)} in the forward pass, and one of type "
                f"{tensor.dtype} and size {tuple(tensor.shape)} when it was replayed. Please report it with the model"
            )
        if tensor.stride() != stride or tensor.storage_offset() != offset:
            # Views of the value are recorded by their offsets and strides, so the layout must be the recorded one.
            tensor = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        self.tensor = tensor
        self.record = None


class DroppedUse:
    """One reader of a dropped value, and the geometry in which it reads it."""

    __slots__ = ("geometry", "value")

    def __init__(self, value: DroppedValue, geometry: Geometry) -> None:
        self.value = value
        self.geometry = geometry
        value.num_uses += 1


Source = HeldTensor | DroppedUse


class StorageNote:
    """What a tape knows about one storage. It is attached to the storage and freed with it.

    ``dropped`` is the dropped content of ``version``, if any; a tensor over the storage with another version means that
    the storage was written where nothing was recorded. ``held`` are the tensors over it that records hold: they are
    copied before the storage is written.
    """

    __slots__ = ("__weakref__", "dropped", "held", "tape_token", "version")

    def __init__(self, tape_token: object) -> None:
        self.tape_token = tape_token
        self.dropped: DroppedValue | None = None
        self.version = 0
        self.held: list[weakref.ref[HeldTensor]] = []

    def content(self, tensor: Tensor) -> DroppedValue | None:
        """Return the dropped value that ``tensor``, over this storage, is or is a view of; None if there is none."""
        if self.dropped is not None and tensor._version != self.version:
            self.dropped = None
        return self.dropped


NOTES: StorageAttribute[StorageNote] = StorageAttribute("note")
"""The note on each storage, whichever tape wrote it."""
