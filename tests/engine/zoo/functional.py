"""Corners of torch's op set: linear algebra, losses, resampling, sparse and jagged tensors, quantisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares
from torch import Tensor, nn

WIDTH = 6
functional = nn.functional


class Computes(nn.Module):
    """Two linear layers and a vector of weights, handed to a function together with the input."""

    def __init__(self, compute: Callable[[Computes, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.weights = nn.Parameter(torch.randn(WIDTH))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def linear_algebra(model: Computes, x: Tensor) -> Tensor:
    """Factorisations, a solve, an inverse and a determinant."""
    matrix = model.first(torch.eye(WIDTH) + x[:1])
    gram = matrix @ matrix.T + 3 * torch.eye(WIDTH)
    _, singular_values, _ = torch.linalg.svd(matrix, full_matrices=False)
    diagonals = torch.linalg.cholesky(gram).diagonal() + torch.linalg.qr(gram)[1].diagonal()
    solved = torch.linalg.solve(gram, model.second(x).T).T
    spectra = singular_values + torch.linalg.eigvalsh(gram)
    return torch.tanh((solved + diagonals + spectra + torch.logdet(gram)) / 20)


def losses(model: Computes, x: Tensor) -> Tensor:
    """Losses that keep more than their inputs."""
    hidden = model.first(x)
    classes = torch.arange(4) % WIDTH
    log_probabilities = hidden.log_softmax(-1)
    total = functional.nll_loss(log_probabilities, classes) + functional.multi_margin_loss(hidden, classes)
    total = total + functional.kl_div(log_probabilities, x.softmax(-1), reduction="batchmean")
    total = total + functional.smooth_l1_loss(hidden, x) + functional.gaussian_nll_loss(hidden, x, hidden.tanh().exp())
    total = total + torch.cdist(hidden, x).mean() + functional.pdist(hidden).mean()
    total = total + functional.cosine_similarity(hidden, x).mean()
    frames = model.second(x).log_softmax(-1)[:, None].expand(4, 2, WIDTH)
    lengths = torch.tensor([4, 4]), torch.tensor([2, 2])
    total = total + functional.ctc_loss(frames, torch.tensor([[1, 2], [2, 3]]), *lengths)
    return torch.tanh(hidden * total / 50)


def resampling(model: Computes, x: Tensor) -> Tensor:
    """Sampling on a grid, unfolding into patches and folding back, and rarer activations and poolings."""
    image = model.first(x)[:, None, None].expand(4, 1, WIDTH, WIDTH).contiguous()
    grid = torch.tanh(model.second(x)).view(4, 3, 1, 2)
    sampled = functional.grid_sample(image, grid, align_corners=False)
    folded = functional.fold(functional.unfold(image, 2).cos(), (WIDTH, WIDTH), 2)
    rest = functional.adaptive_max_pool2d(image, 2).mean() + functional.glu(image).mean()
    rest = rest + functional.hardswish(image).mean() + functional.mish(image).mean()
    rest = rest + functional.prelu(image, model.weights[:1]).mean() + functional.rms_norm(image, (WIDTH,)).mean()
    return folded * sampled.mean() + rest


def sparse_graph(model: Computes, x: Tensor) -> Tensor:
    """Two rounds of message passing with a sparse matrix whose values are trained."""
    places = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 1]])
    edges = torch.sparse_coo_tensor(places, model.weights[:5].exp(), (4, 4), check_invariants=True)
    hidden = torch.relu(torch.sparse.mm(edges, model.first(x)))
    return torch.sparse.mm(edges, model.second(hidden)) + hidden


def jagged_batch(model: Computes, x: Tensor) -> Tensor:
    """A nested tensor, which is a tensor subclass."""
    rows = [model.first(x[:2]), model.first(x[2:3])]
    jagged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return torch.tanh(model.second(jagged)).values() * 2


def fake_quantisation(model: Computes, x: Tensor) -> Tensor:
    """Rounding to a grid with gradients that pass inside of its range."""
    scales, zeros = torch.full((WIDTH,), 0.1), torch.zeros(WIDTH, dtype=torch.int32)
    by_tensor = torch.fake_quantize_per_tensor_affine(model.first(x).tanh(), 0.05, 0, -128, 127)
    by_channel = torch.fake_quantize_per_channel_affine(model.second(x), scales, zeros, 1, -8, 7)
    return by_tensor * by_channel.exp()


def mixed_precision_by_hand(model: Computes, x: Tensor) -> Tensor:
    """Casts back and forth, and the same bits read as another type."""
    hidden = functional.gelu(model.first(x).to(torch.bfloat16)).float()
    truncated = hidden.detach().view(torch.int32).bitwise_and(-65536).view(torch.float32)
    return (hidden.double() * truncated.double()).float().tanh().half().float() * model.second(x)


def on_random_matrix(compute: Callable[[Computes, Tensor], Tensor]) -> Callable[[], Step]:
    """Return a way to build a model that computes ``compute`` on a random matrix."""
    return lambda: (Computes(compute), torch.randn(4, WIDTH), mean_of_squares)


EXAMPLES = (
    Example("linear-algebra", on_random_matrix(linear_algebra)),
    Example("losses", on_random_matrix(losses)),
    Example("resampling", on_random_matrix(resampling)),
    Example("sparse-graph", on_random_matrix(sparse_graph)),
    Example("jagged-batch", on_random_matrix(jagged_batch)),
    Example("fake-quantisation", on_random_matrix(fake_quantisation)),
    Example("mixed-precision-by-hand", on_random_matrix(mixed_precision_by_hand)),
)
