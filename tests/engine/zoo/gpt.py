"""Small GPTs: dropout everywhere, in four precisions, with tied weights, fused attention and autocast."""

from __future__ import annotations

import math
from functools import partial

import torch
from tests.engine.zoo.example import Example, Step, cross_entropy_with
from torch import Tensor, nn

VOCABULARY = 29
# Sizes that are no multiples of a vector register, so that kernels run their tail loops as well.
WIDTH = 12
LENGTH = 7


class CausalSelfAttention(nn.Module):
    """Attention written out, with dropout on its probabilities, or in one fused call."""

    def __init__(self, width: int, num_heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.fused = fused
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        num_sequences, length, width = x.shape
        heads = self.project_in(x).view(num_sequences, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            mixed = self.dropout(weights) @ value
        return self.dropout(self.project_out(mixed.transpose(1, 2).reshape(x.shape)))


class GptBlock(nn.Module):
    """Layer norm, attention, layer norm, MLP, with two residuals."""

    def __init__(self, width: int, num_heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, num_heads, dropout, fused)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class Gpt(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, num_blocks: int = 3, dropout: float = 0.1, fused: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GptBlock(WIDTH, 2, dropout, fused) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_ids(num_sequences: int = 2, length: int = LENGTH) -> Tensor:
    """Return random token ids."""
    return torch.randint(VOCABULARY, (num_sequences, length))


def gpt(dtype: torch.dtype = torch.float32, *, dropout: float = 0.1, fused: bool = False, tied: bool = False) -> Step:
    """Return a GPT of three blocks that predicts random tokens."""
    model = Gpt(dropout=dropout, fused=fused, tied=tied).to(dtype)
    ids, targets = token_ids(), token_ids()
    return model, ids, cross_entropy_with(targets)


class CastsInside(nn.Module):
    """A GPT that enters autocast in its own forward, not around it."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt()

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.gpt(ids).float()


def gpt_casting_inside() -> Step:
    """Return a GPT whose forward runs in bf16 on fp32 weights."""
    return CastsInside(), token_ids(), cross_entropy_with(token_ids())


autocast_bf16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)

EXAMPLES = (
    Example("gpt", gpt, has_blocks=True),
    Example("gpt-fp64", partial(gpt, torch.float64), has_blocks=True),
    Example("gpt-bf16", partial(gpt, torch.bfloat16), has_blocks=True),
    Example("gpt-fp16", partial(gpt, torch.float16), has_blocks=True),
    Example("gpt-fused-attention", partial(gpt, fused=True), has_blocks=True),
    Example("gpt-fused-attention-bf16", partial(gpt, torch.bfloat16, fused=True), has_blocks=True),
    Example("gpt-tied-weights", partial(gpt, tied=True), has_blocks=True),
    Example("gpt-autocast", gpt, has_blocks=True, context=autocast_bf16),
    Example("gpt-autocast-tied-weights", partial(gpt, tied=True), has_blocks=True, context=autocast_bf16),
    Example("gpt-autocast-inside", gpt_casting_inside, has_blocks=True),
)
