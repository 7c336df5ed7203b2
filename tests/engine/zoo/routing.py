"""Mixtures of experts: which ops run depends on the data, and both Python and buffers count what ran."""

from __future__ import annotations

from functools import partial

import torch
from tests.engine.zoo.example import Example, Step
from torch import Tensor, nn

WIDTH = 10
NUM_EXPERTS = 4


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class MixtureOfExperts(nn.Module):
    """Each token goes to its two best experts; an expert without tokens does not run at all.

    ``num_expert_calls`` counts in Python, ``tokens_per_expert`` in a buffer, and ``bias`` is a buffer that
    moves towards equal load at every forward and changes the next routing: each is wrong after a forward that
    ran twice.
    """

    tokens_per_expert: Tensor
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        self.register_buffer("tokens_per_expert", torch.zeros(NUM_EXPERTS, dtype=torch.long))
        self.register_buffer("bias", torch.zeros(NUM_EXPERTS))
        self.num_expert_calls = 0
        self.loads: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, -2)
        probabilities = self.router(tokens).softmax(-1)
        chosen = (probabilities + self.bias).topk(2, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, slots = (chosen == index).nonzero(as_tuple=True)
            if rows.numel() == 0:
                continue
            self.num_expert_calls += 1
            output.index_add_(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        load = torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS)
        self.loads.append(load.tolist())
        self.tokens_per_expert += load
        if self.training:
            self.bias += 0.05 * torch.sign(load.float().mean() - load)
        return x + output.view_as(x)


def mixture_of_experts(dtype: torch.dtype = torch.float32) -> Step:
    """Return three mixtures in a row on random tokens."""
    model = nn.Sequential(*(MixtureOfExperts() for _ in range(3)), nn.Linear(WIDTH, 1)).to(dtype)
    return model, torch.randn(2, 5, WIDTH, dtype=dtype), lambda output: (output - 1).square().mean()


class EarlyExit(nn.Module):
    """Runs blocks until the activations are large enough: the number of blocks depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5))
        self.depths: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.depths.append(0)
        for block in self.blocks:
            x = x + block(x)
            self.depths[-1] += 1
            if x.norm() > 8:
                break
        return x


def early_exit() -> Step:
    """Return a model whose depth depends on its data."""
    return EarlyExit(), torch.randn(3, WIDTH), lambda output: output.square().mean() - output.mean()


EXAMPLES = (
    Example("mixture-of-experts", mixture_of_experts, has_blocks=True),
    Example("mixture-of-experts-fp64", partial(mixture_of_experts, torch.float64), has_blocks=True),
    Example("early-exit", early_exit, has_blocks=True),
)
