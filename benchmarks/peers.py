"""The methods a user would pick instead of memfit: torch's own checkpointing, whole, in part, and selective; the switch
that the model's framework has for it; and offloading to the host."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from entrant import Method
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_MATMULS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten.convolution.default,
}
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def eager_peers(blocks: Sequence[nn.Module], **options: Any) -> dict[str, Method]:
    """Return the eager methods, each around ``blocks``; ``options`` are torch's own."""
    selective = functools.partial(create_selective_checkpoint_contexts, _save_matmuls_and_attention)

    def method(chosen: Sequence[nn.Module], **more: Any) -> Method:
        return lambda: checkpointed(chosen, **options, **more)

    return {
        "torch: checkpoint every block": method(blocks),
        "torch: checkpoint every 2nd block": method(blocks[::2]),
        "torch: checkpoint every 3rd block": method(blocks[::3]),
        "torch: checkpoint every 4th block": method(blocks[::4]),
        "torch: selective, save matmuls + attention": method(blocks, context_fn=selective),
        "torchtitan: selective, every 2nd matmul": method(blocks, context_fn=_save_every_second_matmul),
    }


def offloaded(device: torch.device) -> AbstractContextManager[Any]:
    """Return torch's offloading of everything that autograd saves. Every byte crosses the bus twice: a slow method."""
    # Without an accelerator nothing can be pinned; there it only tries the code.
    return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")


@contextmanager
def transformers_switch(model: Any) -> Iterator[None]:
    """Turn on the checkpointing of a transformers model."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        # Some releases put a hook on the embedding with it, and leave it there when it is turned off.
        if hasattr(model, "_require_grads_hook"):
            model.disable_input_require_grads()


@contextmanager
def timm_switch(network: Any) -> Iterator[None]:
    """Turn on the checkpointing of a timm model."""
    network.set_grad_checkpointing(True)
    try:
        yield
    finally:
        network.set_grad_checkpointing(False)


@contextmanager
def checkpointed(blocks: Sequence[nn.Module], **options: Any) -> Iterator[None]:
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _save_matmuls_and_attention(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _MATMULS | _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def _save_every_second_matmul() -> Any:
    """torchtitan's rule: as above, but of the matrix products only every second, counted anew in each block."""
    num_matmuls = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _MATMULS:
            num_matmuls[context.is_recompute] += 1
            if num_matmuls[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return _save_matmuls_and_attention(context, op)

    return create_selective_checkpoint_contexts(policy)
