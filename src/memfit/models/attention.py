"""Self-attention as the transformers here use it: one projection in, one fused call, one projection out."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class SelfAttention(nn.Module):
    """Attention of a sequence to itself; each position sees only those before it where ``is_causal``."""

    def __init__(self, width: int, num_heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.is_causal = is_causal
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each position takes from the others."""
        num_sequences, length, width = x.shape
        heads = self.project_in(x).view(num_sequences, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        attended: Tensor = self.project_out(mixed.transpose(1, 2).reshape(x.shape))
        return attended


class TransformerBlock(nn.Module):
    """Layer norm, attention, layer norm, MLP, with two residuals; ``mlp`` may be another module of that shape."""

    def __init__(
        self, width: int, num_heads: int, *, is_causal: bool, dropout: float = 0.0, mlp: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, num_heads, is_causal=is_causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp or nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with what the attention and the MLP add to it."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        result: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return result
