"""One measured training step as data: its ops, the values they make, and the blocks of the model. No torch.

A *value* is what one storage holds between two writes. Views share the value of their base; an op that writes in place
makes a new value in the same storage. Time is counted in ops: the step is the sequence ``ops``, forward pass and loss
first, then the backward pass.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, TypeAlias

from memfit.graph.compiled_data.compiled_blocks import CompiledProfile
from memfit.graph.inputs import Input
from memfit.graph.layer_profile import LayerMemoryProfile
from memfit.graph.records import LARGEST_NUMBER, Count, NumberRange, Seconds
from memfit.graph.summaries import html_summary, text_summary
from memfit.units import format_bytes, format_seconds

# What files may have, where that is less than any number.
OpIndex: TypeAlias = Annotated[int, "last op"]
ValueIndex: TypeAlias = Annotated[int, "last value"]
_NumOps: TypeAlias = Annotated[int, "number of ops"]
_ByteRate: TypeAlias = Annotated[float, NumberRange("a number of bytes a second, from 1 to 1e+15", 1.0, LARGEST_NUMBER)]
_Slowdown: TypeAlias = Annotated[float, NumberRange("a share, at least 0 and at most 1e+15", 0.0, LARGEST_NUMBER)]
_Share: TypeAlias = Annotated[float, NumberRange("a share, above 0 and at most 1", math.nextafter(0.0, 1.0), 1.0)]


class Replay(StrEnum):
    """Whether an op can be replayed, and if not, why."""

    YES = "yes"
    STATEFUL = "not a function of its inputs"
    NO_GRAD = "ran with gradients off, where raw kernels may hide"
    UNORDERED = "sums in no fixed order on this device"


class Phase(StrEnum):
    """The part of the step in which an op ran."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Save:
    """One of autograd's saves of a value: it is read just before an op of the backward pass, and let go after one.

    ``read_before`` is the number of ops where it is never read. ``op_index`` is the op of the forward pass for whose
    sake it was saved, None where that is not known. ``read_place`` orders the reads before one op: what is read
    first is restored first, and stays in memory while the next is restored.
    """

    read_before: _NumOps
    released_after: OpIndex
    op_index: OpIndex | None = None
    read_place: Annotated[int, 2**31] = 0


@dataclass(frozen=True, slots=True)
class RecordedValue:
    """What one storage held between two writes.

    ``op_index`` is the op that made it, None for what came from outside the step (parameters, buffers, the batch).
    ``storage`` numbers the storages of the step: a value written over in place and its successor share one.
    ``dies_after`` is the op after which the program itself has no more use for the storage, so that only autograd's
    saves keep it; None where it outlives the step. ``replays_exactly`` is whether a trial replay gave the same bits.
    """

    name: str
    num_bytes: int
    op_index: OpIndex | None
    storage: ValueIndex
    dies_after: OpIndex | None = None
    saves: tuple[Save, ...] = ()
    replays_exactly: bool = True

    @property
    def is_saved(self) -> bool:
        """Whether autograd saved it, in any view."""
        return bool(self.saves)


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """One op call. Values are given by their index in the profile.

    ``module`` is the path of the module it ran in, None for the loss and whatever else ran outside the model, and for
    the backward pass. ``rewrites`` are the values that it wrote over; those it also read are among its ``inputs``.
    ``outputs`` are the new values by position, None where an output is no new value. ``workspace_bytes`` is what it
    took for itself while it ran, beyond its outputs. ``hidden_writes`` are values that it changed implicitly, as a
    batch norm does its running statistics: a replay that reads them needs a copy. ``replay_seconds`` is what running
    it again takes, None where that is ``seconds``: a pointwise op may run in one kernel with its neighbours.
    ``has_gradients`` is whether gradients were enabled; ops without are not counted with those of the same name.
    """

    module: str | None
    op: str
    call: int
    inputs: tuple[ValueIndex, ...]
    outputs: tuple[ValueIndex | None, ...]
    rewrites: tuple[ValueIndex, ...]
    flops: Count
    replay: Replay
    phase: Phase = Phase.FORWARD
    seconds: Seconds = 0.0
    workspace_bytes: int = 0
    hidden_writes: tuple[ValueIndex, ...] = ()
    replay_seconds: Seconds | None = None
    has_gradients: bool = True


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module with gradients enabled: the ops from ``begin`` to before ``end`` ran in it.

    A call inside no other is a forward pass: of the model, or of a part that the step calls by itself. ``number``
    counts the calls of this module in its forward pass, ``num_backward`` the backward passes of the step before it.
    Modules that several paths lead to have no entry: what they run belongs to the module that calls them.
    """

    path: str
    number: int
    begin: _NumOps
    end: _NumOps
    num_backward: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """A repeated module of the model: the layer that layer strategies choose."""

    path: str
    layer: LayerMemoryProfile


@dataclass(frozen=True, slots=True)
class HostCosts:
    """The seconds that the host spends to launch a plain step, and on each action of the engine.

    ``forward`` and ``backward`` are the plain step's, the optimizer's part in the latter. Then: an op that runs where
    ops are recorded, with the views around it, and more where its result is dropped; entering a recorded module;
    a tensor that autograd saves under a saved-tensor hook, and unpacking it; a replayed op.
    ``runs_ahead`` says that steps are launched while the device still computes the one before; a model that reads
    results back in its forward pass waits for them, and so for the step before. ``hooks_only_dropped_saves`` says that
    where ops are recorded, saved-tensor hooks are active only around the saves of dropped values. ``planned_pass`` is
    what a pass by any plan takes beside all that. On a CPU, which is its own host, ``forward`` and ``backward`` are 0,
    and whatever the engine does makes the step longer.
    """

    forward: Seconds
    backward: Seconds
    recorded_op: Seconds
    dropped_op: Seconds
    module_entry: Seconds
    hooked_save: Seconds
    replayed_op: Seconds
    runs_ahead: bool = False
    hooks_only_dropped_saves: bool = False
    planned_pass: Seconds = 0.0


HOST_SECONDS = ("forward", "backward", "recorded_op", "dropped_op", "module_entry", "hooked_save", "replayed_op")
"""The fields of ``HostCosts`` that are seconds."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link between the device and the host's pinned memory: bytes a second out of the device and back into it.

    ``seconds_per_copy`` is what each copy takes beyond its bytes. ``host_free_bytes`` is how much memory of the host
    was free when that was measured. ``slowdown`` is the share by which the device computes longer while it copies,
    ``host_seconds`` what the host itself spends on sending a value and on fetching it.
    """

    out_bytes_per_second: _ByteRate
    back_bytes_per_second: _ByteRate
    seconds_per_copy: Seconds
    host_free_bytes: int
    slowdown: _Slowdown = 0.0
    host_seconds: Seconds = 0.0


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class ModelProfile:
    """One measured training step.

    ``peak_bytes`` is the measured peak of the plain step: everything that lived on the device, parameters included.
    ``device_bytes`` is all the memory that the device has, ``free_bytes`` how much of it this step can have at most,
    counting what it holds already; None where that is not known. ``measured_with`` says how the numbers were measured.
    ``host`` is what the host has to do, while the device computes or, on a CPU, in its place; None where it was not
    measured.
    ``inputs`` are the tensors that the model was called with. ``link`` connects to the host's memory; None where that
    is the device's own, or it was not measured. ``unthrottled_share`` is what the ops would take in all, as a share of
    their seconds in the step, on a device whose clock is not throttled. ``chunks_loss`` is whether the step computes a
    language model's head and loss in chunks of tokens. ``module_calls`` are the calls of modules with gradients, in the
    order in which they began; empty where they were not recorded.
    ``compiled`` is what was measured of compiled blocks; plans for such a profile compile them. ``notes`` say in words
    what limits plans for this step: a random structure, parts that are opaque to memfit. ``skipped_modules`` are the
    outermost modules that other runs of the step skip.
    """

    ops: tuple[RecordedOp, ...]
    values: tuple[RecordedValue, ...]
    blocks: tuple[Block, ...]
    peak_bytes: int
    step_seconds: Seconds
    device: str
    fingerprint: str
    device_bytes: int | None = None
    free_bytes: int | None = None
    measured_with: str = "real step"
    host: HostCosts | None = None
    inputs: tuple[Input, ...] = ()
    link: Link | None = None
    unthrottled_share: _Share = 1.0
    chunks_loss: bool = False
    module_calls: tuple[ModuleCall, ...] = ()
    compiled: CompiledProfile | None = None
    notes: tuple[str, ...] = ()
    skipped_modules: tuple[str, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to ``path`` as JSON, compressed where the path ends in ``.gz``."""
        from memfit.graph.profile_file import save_profile

        save_profile(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ModelProfile:
        """Return the profile in the file at ``path``; what is wrong with it is a ``PlanFileError`` with the place."""
        from memfit.graph.profile_file import load_profile

        return load_profile(path)

    def for_cuda_graph(self) -> ModelProfile:
        """Return the profile of the same step captured into a CUDA graph: launching is free, nothing is offloaded."""
        if self.host is None and self.link is None:
            return self
        launching = None if self.host is None else HostCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, runs_ahead=True)
        return replace(self, host=launching, link=None)

    @property
    def layers(self) -> tuple[LayerMemoryProfile, ...]:
        """The measured layers: one for each block, numbered in the order in which they ran."""
        return tuple(block.layer for block in self.blocks)

    def summary_lines(self) -> dict[str, str]:
        """Return what was measured, a few words for each."""
        return {
            "peak": format_bytes(self.peak_bytes),
            "step": format_seconds(self.step_seconds),
            "ops": f"{len(self.ops)} ops, {len(self.values)} values, {len(self.blocks)} blocks",
            "measured": f"on {self.device}, {self.measured_with}",
            **({} if self.compiled is None else {"compiled": self.compiled.in_words()}),
            **({"note": "; ".join(self.notes)} if self.notes else {}),
        }

    def __repr__(self) -> str:
        return text_summary("ModelProfile", self.summary_lines())

    def _repr_html_(self) -> str:
        return html_summary("ModelProfile", self.summary_lines())
