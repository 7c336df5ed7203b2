"""Sums up the recorded step over the blocks of the model: the measured layers that layer strategies choose from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from memfit.capture.recording.blocks import find_blocks
from memfit.capture.recording.layer_types import layer_type_of
from memfit.graph.layer_profile import LayerMemoryProfile
from memfit.graph.model_profile import Block, Phase, RecordedOp, RecordedValue
from memfit.graph.names import is_within


def measured_blocks(
    model: nn.Module, called: Collection[str], ops: Sequence[RecordedOp], values: Sequence[RecordedValue]
) -> tuple[Block, ...]:
    """Return the blocks of ``model`` with the layer that each makes; ``called`` are the modules that ran, in order."""
    return tuple(
        Block(path, _layer(layer_idx, path, ops, values)) for layer_idx, path in enumerate(find_blocks(model, called))
    )


def bytes_of_skipped_blocks(
    model: nn.Module,
    blocks: Sequence[Block],
    called: Collection[str],
    ops: Sequence[RecordedOp],
    values: Sequence[RecordedValue],
) -> int:
    """Return what the blocks among the ``called`` modules would take at most that are none of ``blocks``.

    For each that is what the largest block of its kind saves, with what the model makes between that and the next
    block, and the gradients of its parameters.
    """
    saved_by = {block.path: saved for block, saved in zip(blocks, _saved_bytes(blocks, ops, values), strict=True)}
    skipped = [path for path in find_blocks(model, called) if path not in saved_by]
    kinds = {path: type(model.get_submodule(path)) for path in (*saved_by, *skipped)}
    saved_bytes = sum(
        max((num_bytes for path, num_bytes in saved_by.items() if kinds[path] is kinds[block]), default=0)
        for block in skipped
    )
    with_gradients = {
        parameter: parameter.nbytes
        for path in skipped
        for parameter in model.get_submodule(path).parameters()
        if parameter.requires_grad
    }
    return saved_bytes + sum(with_gradients.values())


def _saved_bytes(blocks: Sequence[Block], ops: Sequence[RecordedOp], values: Sequence[RecordedValue]) -> Iterator[int]:
    """Yield for each block what autograd saves of what is made from its beginning to that of the next one."""
    begins = [
        next((number for number, op in enumerate(ops) if op.module is not None and is_within(op.module, block.path)), 0)
        for block in blocks
    ]
    for block, begin in zip(blocks, begins, strict=True):
        end = min((other for other in begins if other > begin), default=None)
        made = {index for op in ops[begin:end] if end is not None for index in op.outputs if index is not None}
        between = sum(values[index].num_bytes for index in made if values[index].is_saved)
        yield max(block.layer.activation_size_bytes, between)


def values_leaving_skipped_blocks(
    model: nn.Module, skipped: Collection[str], ops: Sequence[RecordedOp], blocks: Sequence[Block]
) -> set[int]:
    """Return the values that are made in a block which may be skipped, as one of its kind was, and read outside of it.

    Replays that start from the output of a block must not go on into the one before it where that was skipped.
    """
    kinds = {type(model.get_submodule(path)) for path in skipped}
    paths = [block.path for block in blocks if type(model.get_submodule(block.path)) in kinds]
    block_of = [
        None if op.module is None else next((path for path in paths if is_within(op.module, path)), None) for op in ops
    ]
    made_in = {
        index: block
        for op, block in zip(ops, block_of, strict=True)
        if block is not None
        for index in op.outputs
        if index is not None
    }
    return {
        index
        for op, block in zip(ops, block_of, strict=True)
        if op.phase is Phase.FORWARD
        for index in op.inputs
        if made_in.get(index, block) != block
    }


def _layer(layer_idx: int, path: str, ops: Sequence[RecordedOp], values: Sequence[RecordedValue]) -> LayerMemoryProfile:
    inside = [op for op in ops if op.module is not None and is_within(op.module, path)]
    made = {index for op in inside for index in op.outputs if index is not None}
    return LayerMemoryProfile(
        layer_idx=layer_idx,
        layer_type=layer_type_of([op.op for op in inside]),
        activation_size_bytes=sum(values[index].num_bytes for index in made if values[index].is_saved),
        recompute_flops=sum(op.flops for op in inside),
    )
