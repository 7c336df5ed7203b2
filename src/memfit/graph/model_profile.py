"""One measured training step as data: its ops, the values they make, and the blocks of the model. No torch.

A *value* is what one storage holds between two writes. Views share the value of their base; an op that writes in place
makes a new value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memfit.layers.profile import LayerMemoryProfile


class Replay(StrEnum):
    """Whether an op can be replayed, and if not, why."""

    YES = "yes"
    STATEFUL = "not a function of its inputs"
    NO_GRAD = "ran with gradients off, where raw kernels may hide"
    UNORDERED = "sums in no fixed order on this device"


@dataclass(frozen=True, slots=True)
class RecordedValue:
    """What one storage held between two writes.

    ``op_index`` is the op that made it, None for what came from outside the step (parameters, buffers, the batch).
    ``is_saved`` tells whether autograd saved it, in any view; ``comes_back`` whether a trial replay gave the same bits.
    """

    name: str
    num_bytes: int
    op_index: int | None
    is_saved: bool
    comes_back: bool = True


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """One op call of the forward pass. Values are given by their index in the profile.

    ``module`` is the path of the module it ran in, None for the loss and whatever else ran outside the model.
    ``rewrites`` are the values that it wrote over; those it also read are among its ``inputs``. ``outputs`` are the new
    values by position, None where an output is no new value.
    """

    module: str | None
    op: str
    call: int
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    rewrites: tuple[int, ...]
    flops: int
    replay: Replay


@dataclass(frozen=True, slots=True)
class Block:
    """A repeated module of the model: the layer that layer strategies choose."""

    path: str
    layer: LayerMemoryProfile


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One measured training step."""

    ops: tuple[RecordedOp, ...]
    values: tuple[RecordedValue, ...]
    blocks: tuple[Block, ...]
    peak_bytes: int
    step_seconds: float
    device: str
    fingerprint: str

    @property
    def layers(self) -> tuple[LayerMemoryProfile, ...]:
        """The measured layers: one for each block, numbered in the order in which they ran."""
        return tuple(block.layer for block in self.blocks)
