"""Counts the FLOPs of op calls.

torch's formulas are used where there is one. Attention has a formula of its own: some releases of torch raise an error
for grouped-query attention, where key and value have fewer heads than the query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_ATTENTION_FORWARD = {
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
}
_ATTENTION_BACKWARD = {
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward,
}


def flops_of(op: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of a call that gave ``result``; 0 where there is no formula, and where the formula fails."""
    packet = getattr(op, "_overloadpacket", None)
    try:
        if packet in _ATTENTION_FORWARD:
            return _attention_flops(*args[:3])
        if packet in _ATTENTION_BACKWARD:
            return _attention_backward_flops(*args[1:4])
        formula = flop_registry.get(packet)
        return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
    except Exception:
        # A FLOP count is an estimate; no profile may fail for it.
        return 0


def _attention_flops(query: Any, key: Any, value: Any) -> int:
    """Count query @ key and scores @ value. Kernels repeat key and value for each query head, so its heads count."""
    batch, query_heads, query_length, head_size = query.shape
    return int(2 * batch * query_heads * query_length * key.shape[2] * (head_size + value.shape[3]))


def _attention_backward_flops(query: Any, key: Any, value: Any) -> int:
    """Count five products: the scores again, the gradients of scores and value, and those of query and key."""
    batch, query_heads, query_length, head_size = query.shape
    return int(2 * batch * query_heads * query_length * key.shape[2] * (3 * head_size + 2 * value.shape[3]))
