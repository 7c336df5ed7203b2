"""Sums up the recorded step over the blocks of the model: the measured layers that layer strategies choose from."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from memfit.capture.recording.blocks import find_blocks
from memfit.capture.recording.layer_types import layer_type_of
from memfit.graph.layer_profile import LayerMemoryProfile
from memfit.graph.model_profile import Block, RecordedOp, RecordedValue
from memfit.graph.names import is_within


def measured_blocks(
    model: nn.Module, called: Collection[str], ops: Sequence[RecordedOp], values: Sequence[RecordedValue]
) -> tuple[Block, ...]:
    """Return the blocks of ``model`` with the layer that each makes; ``called`` are the modules that ran, in order."""
    return tuple(
        Block(path, _layer(layer_idx, path, ops, values)) for layer_idx, path in enumerate(find_blocks(model, called))
    )


def _layer(layer_idx: int, path: str, ops: Sequence[RecordedOp], values: Sequence[RecordedValue]) -> LayerMemoryProfile:
    inside = [op for op in ops if op.module is not None and is_within(op.module, path)]
    made = {index for op in inside for index in op.outputs if index is not None}
    return LayerMemoryProfile(
        layer_idx=layer_idx,
        layer_type=layer_type_of([op.op for op in inside]),
        activation_size_bytes=sum(values[index].num_bytes for index in made if values[index].is_saved),
        recompute_flops=sum(op.flops for op in inside),
    )
