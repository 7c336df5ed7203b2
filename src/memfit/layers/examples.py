"""A built-in list of layers with realistic numbers, for the demo and for trying things out.

The counts follow from the shapes alone: what each layer writes and the backward pass reads, in 16 bits, with attention
that never stores its scores, and two FLOPs for each multiply-add of the matrix products.
"""

from __future__ import annotations

from memfit.graph.layer_profile import LayerMemoryProfile, LayerTypeHint
from memfit.validation import check_sizes

_BYTES_PER_NUMBER = 2
_BYTES_PER_STATISTIC = 4
# Mean, variance, normalise, scale and shift: about eight operations an element. A norm is bound by memory anyway.
_NORM_FLOPS_PER_NUMBER = 8


def gpt_layers(
    *,
    num_blocks: int = 12,
    width: int = 768,
    num_heads: int = 12,
    sequence_length: int = 1024,
    batch_size: int = 8,
    vocabulary_size: int = 50257,
) -> tuple[LayerMemoryProfile, ...]:
    """Return the layers of a GPT: an embedding, norm, attention, norm and FFN per block, a last norm and the head.

    The defaults are GPT-2 small with a batch of 8 sequences.
    """
    check_sizes(num_blocks=num_blocks, width=width, num_heads=num_heads, sequence_length=sequence_length)
    check_sizes(batch_size=batch_size, vocabulary_size=vocabulary_size)
    num_tokens = batch_size * sequence_length
    stream = num_tokens * width

    norm = (
        LayerTypeHint.NORM,
        stream * _BYTES_PER_NUMBER + 2 * num_tokens * _BYTES_PER_STATISTIC,
        _NORM_FLOPS_PER_NUMBER * stream,
    )
    # Queries, keys, values, their mix, and the projection back; each causal row sees half of the sequence.
    attention = (
        LayerTypeHint.ATTENTION,
        5 * stream * _BYTES_PER_NUMBER + num_heads * num_tokens * _BYTES_PER_STATISTIC,
        8 * stream * width + 2 * stream * sequence_length,
    )
    # Four times the width before and after the activation, and the projection back.
    ffn = (LayerTypeHint.FFN, 9 * stream * _BYTES_PER_NUMBER, 16 * stream * width)
    head = (
        LayerTypeHint.OTHER,
        num_tokens * vocabulary_size * _BYTES_PER_NUMBER,
        2 * stream * vocabulary_size,
    )

    named = [("embedding", (LayerTypeHint.EMBEDDING, stream * _BYTES_PER_NUMBER, stream))]
    for block in range(num_blocks):
        parts = [("norm1", norm), ("attention", attention), ("norm2", norm), ("ffn", ffn)]
        named += [(f"blocks.{block}.{part}", numbers) for part, numbers in parts]
    named += [("last_norm", norm), ("head", head)]
    return tuple(LayerMemoryProfile(index, *numbers, name=name) for index, (name, numbers) in enumerate(named))
