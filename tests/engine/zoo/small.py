"""The smallest models: one op, no parameters, nothing saved, and a plain chain of twenty layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares
from torch import Tensor, nn

WIDTH = 5


class OneOp(nn.Module):
    """A single op, without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class NothingSaved(nn.Module):
    """Linear arithmetic: autograd saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift).sum(0).roll(1) - 3


class Smooth(nn.Module):
    """Smooth everywhere, so that it can be differentiated as often as one likes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.blocks(x)) * x.exp()


def smooth() -> Step:
    """Return a smooth model in float64 whose input requires gradients."""
    return Smooth().double(), torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True), mean_of_squares


def on_random_matrix(kind: Callable[[], nn.Module]) -> Callable[[], Step]:
    """Return a way to build a model on a random matrix that requires gradients."""
    return lambda: (kind(), torch.randn(3, WIDTH, requires_grad=True), mean_of_squares)


def twenty_layers() -> nn.Module:
    """Return twenty linear layers, each with an in-place ReLU."""
    layers = [layer for _ in range(20) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))]
    return nn.Sequential(*layers)


def squares_in_loss() -> Step:
    """Return a linear model whose values are saved by the loss alone, outside of the model."""
    return nn.Linear(WIDTH, WIDTH), torch.randn(3, WIDTH), lambda output: output.exp().log1p().square().mean()


EXAMPLES = (
    Example("one-op", on_random_matrix(OneOp)),
    Example("nothing-saved", on_random_matrix(NothingSaved)),
    Example("smooth-fp64", smooth, has_blocks=True),
    Example("twenty-layers", on_random_matrix(twenty_layers)),
    Example("squares-in-loss", squares_in_loss),
)
