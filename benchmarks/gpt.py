"""The GPT that the benchmarks train: pre-norm blocks, fused attention, a vocabulary of 32k, and its loss inside."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + functional.dropout(attended, self.dropout)
        return x + functional.dropout(self.down(functional.gelu(self.up(self.mlp_norm(x)))), self.dropout)


class GPT(nn.Module):
    """With ``autocast``, the weights stay as they are and the forward pass runs in bf16."""

    def __init__(
        self, num_blocks: int, width: int, vocabulary: int = 32_000, dropout: float = 0.0, autocast: bool = False
    ) -> None:
        super().__init__()
        self.autocast = autocast
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 128), dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def tokens(batch: int, length: int, device: torch.device, vocabulary: int = 32_000) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(device)
