"""Random ops: each draws in forward and must not draw again, nor differently, in a recompute."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares
from torch import Tensor, nn

WIDTH = 6


class StochasticDepth(nn.Module):
    """Skips its body for whole batches or for single rows, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.num_skips = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.body(x)
        if torch.rand(()) < 0.4:
            self.num_skips += 1
            return x
        keep = torch.empty(len(x), 1).bernoulli_(0.7)
        return x + self.body(x) * keep / 0.7


class Noise(nn.Module):
    """Adds Gaussian noise, samples a Gumbel softmax and shuffles rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = y + 0.1 * torch.randn_like(y) * y.exp().clamp(max=2)
        choice = nn.functional.gumbel_softmax(y, tau=0.7, hard=self.training)
        order = torch.randperm(len(y))
        return torch.tanh(choice * y[order] + torch.normal(y, 0.1))


class Reparametrised(nn.Module):
    """A variational autoencoder's sampling, through torch.distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 2 * WIDTH)
        self.decoder = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_deviation = self.encoder(x).chunk(2, dim=-1)
        posterior = torch.distributions.Normal(mean, log_deviation.tanh().exp())
        divergence = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0))
        return torch.tanh(self.decoder(posterior.rsample()) + divergence)


class Samples(nn.Module):
    """Draws from distributions whose kernels are not the usual ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.linear(x).softmax(-1)
        chosen = torch.multinomial(probabilities.detach(), WIDTH, replacement=True)
        counts = torch.poisson(probabilities.detach().exp())
        gammas = torch.distributions.Gamma(probabilities + 1, probabilities.exp()).rsample()
        return torch.tanh(probabilities.gather(1, chosen).log() * counts + gammas)


class OwnGenerator(nn.Module):
    """Draws from a generator of its own and from Python's, not from torch's default one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(5)
        self.python_random = random.Random(6)
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, generator=self.generator) > 0.3
        self.drawn.append(self.python_random.random())
        noise = torch.empty_like(x).uniform_(0.5, 1.5, generator=self.generator)
        return torch.sin(self.linear(x) * mask * noise * self.drawn[-1])


def blocks_of(kind: Callable[[], nn.Module]) -> Callable[[], Step]:
    """Return a way to build three blocks, each a linear layer and ``kind``."""

    def make() -> Step:
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Tanh()) for _ in range(3))
        return nn.Sequential(*blocks), torch.randn(5, WIDTH), mean_of_squares

    return make


def rrelu_last_in_block() -> Step:
    """Return blocks that end in RReLU, whose noise autograd saves before the kernel has filled it."""
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU()) for _ in range(3))
    return nn.Sequential(*blocks), torch.randn(5, WIDTH), mean_of_squares


def channel_dropout() -> Step:
    """Return convolutions with dropout of whole channels, in place and not."""
    layers = [
        nn.Conv2d(2, 4, 1),
        nn.Dropout2d(0.4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 1),
        nn.Dropout2d(0.4, inplace=True),
    ]
    return nn.Sequential(*layers), torch.randn(3, 2, 4, 4), mean_of_squares


def chain(kind: Callable[[], nn.Module]) -> Callable[[], Step]:
    """Return a way to build three blocks of ``kind`` itself."""
    return lambda: (nn.Sequential(*(kind() for _ in range(3))), torch.randn(5, WIDTH), mean_of_squares)


def stochastic_depth() -> Step:
    """Return three blocks that may be skipped, after a layer that never is."""
    blocks = (StochasticDepth() for _ in range(3))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks), torch.randn(5, WIDTH), mean_of_squares


EXAMPLES = (
    Example("rrelu", blocks_of(nn.RReLU), has_blocks=True),
    Example("rrelu-last-in-block", rrelu_last_in_block, has_blocks=True),
    Example("rrelu-in-place", blocks_of(lambda: nn.RReLU(inplace=True)), has_blocks=True),
    Example("alpha-dropout", blocks_of(lambda: nn.AlphaDropout(0.3)), has_blocks=True),
    Example("feature-alpha-dropout", blocks_of(lambda: nn.FeatureAlphaDropout(0.3)), has_blocks=True),
    Example("channel-dropout", channel_dropout),
    Example("stochastic-depth", stochastic_depth, has_blocks=True),
    Example("noise-and-shuffles", chain(Noise), has_blocks=True),
    Example("reparametrised-sampling", chain(Reparametrised), has_blocks=True),
    Example("samples", chain(Samples), has_blocks=True),
    Example("own-generator", chain(OwnGenerator), has_blocks=True),
)
