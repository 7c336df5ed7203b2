"""Compiled blocks as data: the partitions of each kind of block, what was measured of them, and a plan's choice.

A *partition* divides the joint graph of a block into a forward and a backward graph, by the values that the forward
graph saves; the backward graph recomputes the others. Blocks are of one kind when they run the same graphs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from memfit.units import format_seconds

EVERYTHING = "everything"
"""The name of the partition that saves all that the backward pass reads, and recomputes nothing but views."""

TORCH = "torch"
"""The name of the partition that torch chooses by itself."""


@dataclass(frozen=True, slots=True)
class Partition:
    """What the compiled graphs of a block save.

    ``saved`` has, for the hash of each known graph, the names of its nodes that are saved. In other graphs (another
    batch size, another release of torch) what is saved follows from ``price``, the cost of a byte that is held in
    bytes that are moved: 0 saves everything.
    """

    name: str
    price: float
    saved: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class CompiledKind:
    """The blocks of one kind: the paths of the blocks, in the order in which they run, and their partitions.

    The first partition is the one that saves everything, unless the device has no memory for it. ``rounding_unit`` is
    that of the coarsest type that the blocks compute in.
    """

    name: str
    blocks: tuple[str, ...]
    partitions: tuple[Partition, ...]
    rounding_unit: float = 0.0


@dataclass(frozen=True, slots=True)
class SentTensors:
    """Which of the tensors that a block saves it offloads: the first ``most`` within these sizes."""

    smallest_bytes: int
    largest_bytes: int
    most: int

    def may_have(self, num_bytes: int) -> bool:
        """Return whether tensors of this size leave."""
        return self.smallest_bytes <= num_bytes <= self.largest_bytes

    def among(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes of those that leave, of saved storages of these ``sizes``."""
        return [size for size in sizes if self.may_have(size)][: self.most]


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """The kinds of blocks that a plan compiles, and the name of the partition that each block uses, by path.

    ``offloaded`` has, for blocks that offload, which of the tensors that the block saves leave the device.
    """

    kinds: tuple[CompiledKind, ...]
    choice: Mapping[str, str]
    offloaded: Mapping[str, SentTensors] = field(default_factory=dict)

    def partition_of(self, path: str) -> Partition:
        """Return the partition that the block at ``path`` uses."""
        kind = next(kind for kind in self.kinds if path in kind.blocks)
        return next(partition for partition in kind.partitions if partition.name == self.choice[path])

    def partitions(self) -> dict[str, Partition]:
        """Return the partition of each block by its path, in the order in which the blocks run."""
        return {path: self.partition_of(path) for path in self.choice}

    def reference(self) -> CompiledPlan:
        """Return the plan for the compiled step that gradients are compared with: every block saves the most."""
        return CompiledPlan(self.kinds, {path: kind.partitions[0].name for kind in self.kinds for path in kind.blocks})

    @property
    def gradient_tolerance(self) -> float:
        """How far gradients may be from those of the step that saves everything; see `tolerance_of`."""
        return tolerance_of(self.kinds)

    def in_words(self) -> str:
        """Return how many blocks use which partition."""
        counts = Counter(self.choice.values())
        words = f"{len(self.choice)} blocks: " + ", ".join(f"{count} {name}" for name, count in counts.items())
        return f"{words}; {len(self.offloaded)} offload" if self.offloaded else words


def tolerance_of(kinds: Iterable[CompiledKind]) -> float:
    """Return how far the gradients of two partitions may be apart by rounding alone, as a share of their length.

    Kernels that compute a value again are other kernels than those that computed it first: on a GPU they sum in another
    order. The tolerance is the square root of the rounding unit, as for a chunked loss. A random number that is drawn
    anew, or a value of another call, is farther off.
    """
    return math.sqrt(max((kind.rounding_unit for kind in kinds), default=0.0))


class SegmentKind(StrEnum):
    """What runs in a segment of the step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class StepSegment:
    """A part of the step between two borders of blocks.

    ``block`` is the place of the block whose forward or backward pass it is, None for what runs outside blocks. The
    first ``num_held`` blocks hold what they saved. ``base_bytes`` is what is live besides that: at most where the
    segment lies outside blocks, at the beginning of a block's pass.
    """

    kind: SegmentKind
    block: int | None
    num_held: int
    base_bytes: int


@dataclass(frozen=True, slots=True)
class MeasuredPartition:
    """What a block takes with one of its partitions.

    ``held_bytes`` is live from its forward to its backward pass. ``forward_bytes`` and ``backward_bytes`` are what is
    live at most during the passes, beyond what is live when they begin. ``output_bytes`` is what the block saves of its
    own output: live beside ``held_bytes`` in its backward pass, as what reads the output holds it until then.
    A block that does not save the output of the block before it, without ``keeps_input``, holds that block's
    ``output_bytes`` as well. ``seconds`` are those of both passes.
    ``saved_sizes`` are the bytes of the saved storages that may be offloaded, in the order in which they are saved.
    """

    held_bytes: int
    forward_bytes: int
    backward_bytes: int
    seconds: float
    saved_sizes: tuple[int, ...] = ()
    output_bytes: int = 0
    keeps_input: bool = True

    def held_after(self, output_bytes: int) -> int:
        """Return what is held from this block on, where the block before it saves so much of its output."""
        return self.held_bytes if self.keeps_input else self.held_bytes + output_bytes


def held_by(measured: Iterable[MeasuredPartition]) -> list[int]:
    """Return the bytes that each block holds, in the order in which they run."""
    held, output_bytes = [], 0
    for each in measured:
        held.append(each.held_after(output_bytes))
        output_bytes = each.output_bytes
    return held


@dataclass(frozen=True, slots=True)
class CompiledBlock:
    """A block: its path, the place of its kind, and what was measured with each of the kind's partitions."""

    path: str
    kind: int
    measured: tuple[MeasuredPartition, ...]


@dataclass(frozen=True, slots=True)
class OutsideChoice:
    """What the eager engine may recompute outside blocks: the values' names, and what was measured with it.

    ``base_bytes`` are those of the segments, in place of their own; ``seconds`` is what the step takes besides the
    blocks' passes.
    """

    recomputed: tuple[str, ...]
    base_bytes: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class CompiledProfile:
    """The step with compiled blocks: the blocks in the order in which they run, and the segments of the step.

    ``outside_seconds`` is what the step takes besides the blocks' passes, ``plain_seconds`` what the plain step took
    when it was measured interleaved with this one, and ``compile_seconds`` what compiling took. ``not_compiled`` has,
    for the path of each block that stays as it is, why. ``outside`` are choices besides saving all outside blocks.
    """

    kinds: tuple[CompiledKind, ...]
    blocks: tuple[CompiledBlock, ...]
    segments: tuple[StepSegment, ...]
    outside_seconds: float
    plain_seconds: float
    compile_seconds: float = 0.0
    not_compiled: Mapping[str, str] = field(default_factory=dict)
    outside: tuple[OutsideChoice, ...] = ()

    @property
    def has_all_partitions(self) -> bool:
        """Whether there are compiled blocks, and the device had the memory to run all of their partitions."""
        return bool(self.kinds) and all(kind.partitions[0].name == EVERYTHING for kind in self.kinds)

    def in_words(self) -> str:
        """Return how many blocks were compiled, in how many partitions, and what that took."""
        num_partitions = sum(len(kind.partitions) for kind in self.kinds)
        eager = f"; {len(self.not_compiled)} stay in eager" if self.not_compiled else ""
        return (
            f"{len(self.blocks)} blocks ({', '.join(dict.fromkeys(kind.name for kind in self.kinds))}) by "
            f"{num_partitions} partitions, which took {format_seconds(self.compile_seconds)} to compile{eager}"
        )

    def with_outside(self, outside: OutsideChoice) -> CompiledProfile:
        """Return the step as it was measured with that choice of what is recomputed outside blocks."""
        segments = tuple(
            replace(segment, base_bytes=base) for segment, base in zip(self.segments, outside.base_bytes, strict=True)
        )
        return replace(self, segments=segments, outside_seconds=outside.seconds, outside=())
