"""Reads what kind of layer a block is from the ops it runs."""

from __future__ import annotations

from collections.abc import Collection

from memfit.graph.layer_profile import LayerTypeHint

_MATMULS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution", "aten.linear", "aten._grouped_mm"}
_NORMS = {
    "aten.native_layer_norm",
    "aten.native_batch_norm",
    "aten.cudnn_batch_norm",
    "aten.native_group_norm",
    "aten._fused_rms_norm",
    "aten.rsqrt",
}


def layer_type_of(ops: Collection[str]) -> LayerTypeHint:
    """Return the type of a layer that runs ``ops``: attention wins over the feed-forward part in the same block."""
    names = set(ops)
    if any("attention" in name for name in names) or {"aten.bmm", "aten._softmax"} <= names:
        return LayerTypeHint.ATTENTION
    if {"aten.bmm", "aten._safe_softmax"} <= names:
        return LayerTypeHint.ATTENTION
    if names & _MATMULS:
        return LayerTypeHint.FFN
    if "aten.embedding" in names:
        return LayerTypeHint.EMBEDDING
    if names & _NORMS:
        return LayerTypeHint.NORM
    return LayerTypeHint.OTHER
