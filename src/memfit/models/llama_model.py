"""A Llama-style transformer: rotary positions, RMS norms, gated MLPs, and fewer key heads than query heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.validation import check_divides, check_sizes

_ROTARY_BASE = 10_000.0


class RotaryAttention(nn.Module):
    """Causal attention whose queries and keys are turned by their position; several queries share a key."""

    def __init__(self, width: int, num_heads: int, num_key_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads, self.head_width = num_heads, num_key_heads, width // num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, num_key_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, num_key_heads * self.head_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return what each position takes from those before it."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = _turned(query, cosine, sine), _turned(key, cosine, sine)
        num_shared = self.num_heads // self.num_key_heads
        key, value = key.repeat_interleave(num_shared, 1), value.repeat_interleave(num_shared, 1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return attended


class GatedMlp(nn.Module):
    """SwiGLU: a product of two projections, one of them through a SiLU, projected back."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated projection of ``x``."""
        projected: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return projected


class LlamaBlock(nn.Module):
    """Attention and gated MLP, each behind an RMS norm and around a residual."""

    def __init__(self, width: int, num_heads: int, num_key_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = RotaryAttention(width, num_heads, num_key_heads)
        self.mlp_norm = nn.RMSNorm(width)
        # Two thirds of four widths: three matrices with as many weights as a usual MLP's two.
        self.mlp = GatedMlp(width, 8 * width // 3)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return ``x`` with what the attention and the MLP add to it."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Llama(nn.Module):
    """Token ids in, the mean loss of predicting each next token out."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, layers: int, width: int, heads: int, key_heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, key_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        turns = torch.outer(torch.arange(length), _ROTARY_BASE ** -(torch.arange(half) / half))
        self.register_buffer("cosine", turns.cos(), persistent=False)
        self.register_buffer("sine", turns.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss on ``tokens``, of which each but the first is to be predicted."""
        x = self.tokens(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def llama(
    layers: int = 6,
    width: int = 256,
    heads: int = 8,
    key_heads: int = 2,
    batch: int = 4,
    length: int = 256,
    vocabulary: int = 512,
) -> tuple[nn.Module, Tensor]:
    """Return a Llama-style model and a batch of random tokens for it."""
    check_sizes(layers=layers, width=width, heads=heads, key_heads=key_heads, batch=batch, length=length)
    check_sizes(vocabulary=vocabulary)
    check_divides(2 * heads, "2 * heads", width, "width")
    check_divides(key_heads, "key_heads", heads, "heads")
    return Llama(layers, width, heads, key_heads, length, vocabulary), torch.randint(vocabulary, (batch, length + 1))


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair of features by its position's angle."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)
