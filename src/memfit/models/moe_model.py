"""A mixture of experts: a GPT whose MLPs are many, of which a router chooses for each token.

How many tokens an expert gets depends on the numbers, and changes from step to step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memfit.models.attention import TransformerBlock
from memfit.models.gpt_model import Gpt
from memfit.validation import check_divides, check_sizes


class Experts(nn.Module):
    """Several MLPs; each token goes through the ``num_chosen`` that its router scores highest."""

    num_routed: Tensor

    def __init__(self, width: int, num_experts: int, num_chosen: int) -> None:
        super().__init__()
        self.num_chosen = num_chosen
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_experts)
        )
        # How many tokens each expert has had, as load balancing wants to know.
        self.register_buffer("num_routed", torch.zeros(num_experts, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs."""
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.num_chosen)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            self.num_routed[number] += rows.numel()
            mixed = mixed.index_add(0, rows, expert(tokens[rows]) * weights[rows, places].unsqueeze(-1))
        return mixed.view(x.shape)


def moe(
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    experts: int = 4,
    chosen: int = 2,
    batch: int = 4,
    length: int = 128,
    vocabulary: int = 512,
) -> tuple[nn.Module, Tensor]:
    """Return a mixture-of-experts language model and a batch of random tokens for it."""
    check_sizes(layers=layers, width=width, heads=heads, experts=experts, batch=batch, length=length)
    check_sizes(vocabulary=vocabulary, chosen=chosen)
    check_divides(heads, "heads", width, "width")
    model = Gpt(layers, width, heads, length, vocabulary, dropout=0.0)
    model.blocks = nn.ModuleList(
        TransformerBlock(width, heads, is_causal=True, mlp=Experts(width, experts, min(chosen, experts)))
        for _ in range(layers)
    )
    return model, torch.randint(vocabulary, (batch, length + 1))
