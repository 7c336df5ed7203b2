"""The values a tape knows: tensors it holds, and values it dropped together with the recipes that bring them back.

Who refers to whom decides when memory is freed, with no help from the garbage collector:

    autograd ──▶ DroppedUse ──▶ DroppedValue ──▶ Recipe ──▶ its sources: DroppedUse, HeldTensor ──▶ …
    storage  ──▶ StorageNote ──▶ DroppedValue                             (while the forward pass runs)

A dropped value is referred to by whoever still needs it: autograd, and the recipes that have yet to run. A recipe that
has run is given up, and with it its sources. So a replayed value lives exactly until its last dependent is done with
it, and no storage is ever referred to by what it refers to.

An offloaded value is a dropped one whose recipe has no sources and fetches it from the host (`offloading.py`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memfit.runtime.storage_attribute import StorageAttribute
from memfit.runtime.torch_internals import negated_view

if TYPE_CHECKING:
    from memfit.runtime.recipes import Recipe
    from memfit.runtime.recorded_modules import Place


# Where a tensor lies in its storage, and how its bits are to be read: size, stride, offset, dtype, is_conj, is_neg. A
# bare tuple, because one is made for every tensor that the tape meets.
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
    """Return all that lies in the tensor's storage, as bytes over it: its own elements may not fill that."""
    num_bytes = tensor.untyped_storage().nbytes()
    return tensor_with((torch.Size((num_bytes,)), (1,), 0, torch.uint8, False, False), tensor)


class HeldTensor:
    """A tensor kept for the backward pass, with the version it had: it must not have changed when it is read.

    ``place`` and ``op_name`` say, for an error message, who reads it (None: autograd itself).
    """

    __slots__ = ("__weakref__", "op_name", "place", "tensor", "version")

    def __init__(self, tensor: Tensor, place: Place, op_name: str | None) -> None:
        self.tensor = tensor
        # An inference tensor has no version, and autograd refuses to save it.
        self.version = -1 if tensor.is_inference() else tensor._version
        self.place = place
        self.op_name = op_name

    def num_writes(self) -> int:
        """Return how often the tensor was written since, as far as that is counted."""
        return self.tensor._version - self.version if self.version >= 0 else 0

    def replace(self, copy: Tensor) -> None:
        """Hold ``copy``, which equals what is held now, because the original is about to be written."""
        self.tensor = copy
        self.version = copy._version


class DroppedValue:
    """The content of a storage that was let go: ``recipe`` brings it back, and from then on ``tensor`` is it."""

    __slots__ = ("__weakref__", "geometry", "num_uses", "recipe", "tensor")

    def __init__(self, recipe: Recipe, geometry: Geometry) -> None:
        self.recipe: Recipe | None = recipe
        self.tensor: Tensor | None = None
        self.geometry = geometry
        self.num_uses = 0

    def fill(self, tensor: Tensor) -> None:
        """Take the replayed ``tensor`` as this value and give up the recipe."""
        size, stride, offset, dtype, _, _ = self.geometry
        if tensor.dtype != dtype or tensor.shape != size:
            raise RuntimeError(
                f"an op gave a tensor of type {dtype} and size {tuple(size)} in the forward pass, and one of type "
                f"{tensor.dtype} and size {tuple(tensor.shape)} when it was replayed. Please report it with the model"
            )
        if tensor.stride() != stride or tensor.storage_offset() != offset:
            # Views of the value were recorded by their place in memory, so the layout must be the recorded one.
            tensor = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        self.tensor = tensor
        self.recipe = None


class DroppedUse:
    """One reader of a dropped value, and the geometry in which it reads it."""

    __slots__ = ("geometry", "value")

    def __init__(self, value: DroppedValue, geometry: Geometry) -> None:
        self.value = value
        self.geometry = geometry
        value.num_uses += 1


Source = HeldTensor | DroppedUse


class StorageNote:
    """What a tape knows of one storage, attached to that storage and gone with it.

    ``dropped`` is what it held at ``version``, where that was dropped; a tensor of another version over the storage
    means that somebody wrote it while the tape did not listen. ``held`` are the tensors over it that recipes hold, to
    be copied should the storage be written.
    """

    __slots__ = ("__weakref__", "dropped", "held", "tape_token", "version")

    def __init__(self, tape_token: object) -> None:
        self.tape_token = tape_token
        self.dropped: DroppedValue | None = None
        self.version = 0
        self.held: list[weakref.ref[HeldTensor]] = []

    def content(self, tensor: Tensor) -> DroppedValue | None:
        """Return the dropped value that ``tensor``, which lies in this storage, is or is a view of, or None."""
        if self.dropped is not None and tensor._version != self.version:
            self.dropped = None
        return self.dropped


NOTES: StorageAttribute[StorageNote] = StorageAttribute("note")
"""The note on each storage, whichever tape wrote it."""
