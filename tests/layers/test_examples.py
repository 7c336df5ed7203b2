"""The built-in GPT: its bytes and FLOPs follow from the shapes."""

from __future__ import annotations

import pytest

from memfit import InvalidParameterError, LayerMemoryProfile, LayerTypeHint
from memfit.layers.examples import gpt_layers


def test_a_tiny_gpt_by_hand() -> None:
    # 2 sequences of 3 tokens, width 4: a stream of 24 numbers of 2 bytes.
    layers = gpt_layers(num_blocks=1, width=4, num_heads=2, sequence_length=3, batch_size=2, vocabulary_size=10)
    norm = (LayerTypeHint.NORM, 48 + 2 * 6 * 4, 8 * 24)
    assert layers == (
        LayerMemoryProfile(0, LayerTypeHint.EMBEDDING, 48, 24, "embedding"),
        LayerMemoryProfile(1, *norm, "blocks.0.norm1"),
        LayerMemoryProfile(
            2, LayerTypeHint.ATTENTION, 5 * 48 + 2 * 6 * 4, 8 * 24 * 4 + 2 * 24 * 3, "blocks.0.attention"
        ),
        LayerMemoryProfile(3, *norm, "blocks.0.norm2"),
        LayerMemoryProfile(4, LayerTypeHint.FFN, 9 * 48, 16 * 24 * 4, "blocks.0.ffn"),
        LayerMemoryProfile(5, *norm, "last_norm"),
        LayerMemoryProfile(6, LayerTypeHint.OTHER, 6 * 10 * 2, 2 * 24 * 10, "head"),
    )


def test_the_matrix_products_add_up_to_two_flops_per_parameter_and_token() -> None:
    # GPT-2 small has 12 × 12 × 768² parameters in its blocks, each used once per token.
    blocks = [layer for layer in gpt_layers() if layer.layer_type in (LayerTypeHint.ATTENTION, LayerTypeHint.FFN)]
    attention_scores = 12 * 2 * (8 * 1024) * 768 * 1024
    flops = sum(layer.recompute_flops for layer in blocks)
    assert flops - attention_scores == 2 * (12 * 12 * 768**2) * (8 * 1024)


def test_shapes_must_be_positive() -> None:
    with pytest.raises(InvalidParameterError, match=r"num_blocks must be a whole number, at least 1.* got 0"):
        gpt_layers(num_blocks=0)
