"""torch's own transformer layers and attention, with masks, dropout and both norm orders."""

from __future__ import annotations

from functools import partial

import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares
from torch import Tensor, nn

WIDTH = 8
LENGTH = 5


class Encoder(nn.Module):
    """torch's encoder with a causal mask and padding."""

    def __init__(self, norm_first: bool, activation: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 3 * WIDTH, dropout=0.1, activation=activation, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        causal = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1)
        return self.encoder(x, mask=causal, src_key_padding_mask=padding, is_causal=True)


def encoder(norm_first: bool, activation: str, dtype: torch.dtype = torch.float32) -> Step:
    """Return a causal encoder whose second sequence is padded."""
    padding = torch.zeros(2, LENGTH, dtype=dtype)
    padding[1, -2:] = -torch.inf
    return (
        Encoder(norm_first, activation).to(dtype),
        (torch.randn(2, LENGTH, WIDTH, dtype=dtype), padding),
        mean_of_squares,
    )


class SequenceToSequence(nn.Module):
    """torch's encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.transformer(source, target)


def sequence_to_sequence() -> Step:
    """Return torch's whole transformer."""
    return SequenceToSequence(), (torch.randn(2, LENGTH, WIDTH), torch.randn(2, 3, WIDTH)), mean_of_squares


class AttentionWithWeights(nn.Module):
    """Multi-head attention that returns its weights, with other widths for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, kdim=3, vdim=4, add_bias_kv=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(query, key, value, need_weights=True, average_attn_weights=False)


def attention_with_weights() -> Step:
    """Return attention over three inputs that require gradients."""
    batch = tuple(torch.randn(LENGTH, 2, width, requires_grad=True) for width in (WIDTH, 3, 4))
    return (
        AttentionWithWeights(),
        batch,
        lambda outputs: mean_of_squares(outputs[0]) + outputs[1].square().sum(),
    )


EXAMPLES = (
    Example("torch-encoder-post-norm", partial(encoder, False, "relu"), has_blocks=True),
    Example("torch-encoder-pre-norm", partial(encoder, True, "gelu"), has_blocks=True),
    Example("torch-encoder-bf16", partial(encoder, True, "gelu", torch.bfloat16), has_blocks=True),
    Example("torch-sequence-to-sequence", sequence_to_sequence, has_blocks=True),
    Example("torch-attention-with-weights", attention_with_weights),
)
