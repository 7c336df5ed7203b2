"""Weights that are shared, frozen, low-rank or used several times in one step."""

from __future__ import annotations

import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares
from tests.engine.zoo.gpt import Gpt, cross_entropy_with, token_ids
from torch import Tensor, nn

WIDTH = 9


def mlp_block() -> nn.Module:
    """Return the block that this family's models are made of."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class TiedAutoencoder(nn.Module):
    """Decodes with the transposed weights that it encodes with."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder:
            x = torch.tanh(layer(x))
        for layer in reversed(self.encoder):
            x = torch.tanh(x @ layer.weight)
        return x


class OneBlockManyTimes(nn.Module):
    """One block applied four times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.block = mlp_block()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + self.dropout(self.block(x))
        return x


class Twins(nn.Module):
    """Calls one model twice in a step, as contrastive losses do; batch norm sees both calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1))
                for _ in range(3)
            )
        )
        self.num_calls = 0

    def encode(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return nn.functional.normalize(self.blocks(x), dim=-1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        similarity = self.encode(left) @ self.encode(right).T
        return nn.functional.cross_entropy(similarity / 0.1, torch.arange(len(left)))


class LowRankAdapter(nn.Module):
    """A frozen linear layer plus a trainable low-rank one."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(self.dropout(x)))


class CallsItself(nn.Module):
    """Calls itself, the whole module with its hooks, until a depth is reached."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp_block() for _ in range(2))

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self(x.tanh(), depth - 1) if depth else x


def calls_itself() -> Step:
    """Return a recursive model."""
    return CallsItself(), torch.randn(4, WIDTH), mean_of_squares


def tied_autoencoder() -> Step:
    """Return an autoencoder with tied weights."""
    return TiedAutoencoder(), torch.randn(4, WIDTH), mean_of_squares


def one_block_many_times() -> Step:
    """Return a model with one block used four times."""
    return OneBlockManyTimes(), torch.randn(4, WIDTH), mean_of_squares


def twins() -> Step:
    """Return a contrastive model; its output is the loss."""
    return Twins(), (torch.randn(5, WIDTH), torch.randn(5, WIDTH)), None


def low_rank_adapters() -> Step:
    """Return a frozen GPT of which only low-rank adapters train, so that gradients begin in the middle."""
    model = Gpt()
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention.project_in = LowRankAdapter(block.attention.project_in, 2)
        block.mlp[0] = LowRankAdapter(block.mlp[0], 2)
    return model, token_ids(), cross_entropy_with(token_ids())


class FrozenMiddle(nn.Module):
    """Frozen blocks between trained ones, some of them under no_grad, and an output that is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp_block() for _ in range(4))
        self.blocks[1].requires_grad_(False)
        self.teacher = mlp_block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = self.teacher(x)
        for block in self.blocks:
            x = x + block(x)
        return x, (target - x).square().mean().detach()


def frozen_middle() -> Step:
    """Return a model with frozen parts."""
    return FrozenMiddle(), torch.randn(4, WIDTH), lambda outputs: mean_of_squares(outputs[0])


EXAMPLES = (
    Example("tied-autoencoder", tied_autoencoder),
    Example("one-block-many-times", one_block_many_times),
    Example("called-twice", twins, has_blocks=True),
    Example("calls-itself", calls_itself, has_blocks=True),
    Example("low-rank-adapters", low_rank_adapters, has_blocks=True),
    Example("frozen-middle", frozen_middle, has_blocks=True),
)
