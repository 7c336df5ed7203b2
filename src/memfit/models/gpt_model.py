"""A GPT: learned positions, pre-norm blocks, and the next token as its task."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.models.attention import TransformerBlock
from memfit.validation import check_divides, check_sizes


class Gpt(nn.Module):
    """Token ids in, the mean loss of predicting each next token out."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, is_causal=True, dropout=dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss on ``tokens``, of which each but the first is to be predicted."""
        x = self.tokens(tokens[:, :-1]) + self.positions.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gpt(
    layers: int = 6,
    width: int = 256,
    heads: int = 4,
    batch: int = 8,
    length: int = 256,
    vocabulary: int = 512,
    dropout: float = 0.0,
) -> tuple[nn.Module, Tensor]:
    """Return a GPT and a batch of random tokens for it."""
    check_sizes(layers=layers, width=width, heads=heads, batch=batch, length=length, vocabulary=vocabulary)
    check_divides(heads, "heads", width, "width")
    model = Gpt(layers, width, heads, length, vocabulary, dropout)
    return model, torch.randint(vocabulary, (batch, length + 1))
