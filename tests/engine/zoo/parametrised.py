"""Weights that are computed: spectral norm (changes buffers in forward), weight norm, pruning."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

WIDTH = 6


class Symmetric(nn.Module):
    """A parametrization that a user might write."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def symmetric(linear: nn.Linear) -> nn.Module:
    """Make a linear layer symmetric."""
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


def pruned(linear: nn.Linear) -> nn.Module:
    """Prune half of a linear layer's weights; torch multiplies by the mask in a forward pre-hook."""
    return prune.random_unstructured(linear, "weight", amount=0.5)


def orthogonal(linear: nn.Linear) -> nn.Module:
    """Make a linear layer orthogonal by the matrix exponential."""
    return parametrizations.orthogonal(linear, orthogonal_map="matrix_exp")


def chain(parametrise: Callable[[nn.Linear], nn.Module]) -> Callable[[], Step]:
    """Return a way to build three blocks whose linear layer is parametrised."""

    def make() -> Step:
        blocks = (nn.Sequential(parametrise(nn.Linear(WIDTH, WIDTH)), nn.SELU()) for _ in range(3))
        return nn.Sequential(*blocks), torch.randn(5, WIDTH), mean_of_squares

    return make


class CachedWeights(nn.Module):
    """Computes a parametrised weight once and uses it twice, inside ``parametrize.cached``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.linear(torch.tanh(self.linear(x)))


def cached_weights() -> Step:
    """Return a model with one computed weight that is used twice."""
    return CachedWeights(), torch.randn(5, WIDTH), mean_of_squares


EXAMPLES = (
    Example("spectral-norm", chain(parametrizations.spectral_norm), has_blocks=True),
    Example("weight-norm", chain(parametrizations.weight_norm), has_blocks=True),
    Example("orthogonal-weights", chain(orthogonal), has_blocks=True),
    Example("symmetric-weights", chain(symmetric), has_blocks=True),
    Example("pruned-weights", chain(pruned), has_blocks=True),
    Example("cached-parametrization", cached_weights),
)
