"""Indexing, sorting, scanning, masking, and embeddings with padding, sparse gradients and bags."""

from __future__ import annotations

import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares
from torch import Tensor, nn

WIDTH = 6


class SortAndScatter(nn.Module):
    """sort, topk, gather, scatter, index_select, take_along_dim, index_put with repeated places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        ordered, order = y.sort(dim=-1)
        best = y.topk(3, dim=-1)
        back = torch.zeros_like(y).scatter(-1, order, ordered * 2)
        summed = torch.zeros_like(y).scatter_add(-1, best.indices, best.values.exp())
        spread = torch.zeros_like(y).scatter_reduce(-1, best.indices, best.values, "amax", include_self=False)
        rows = torch.tensor([2, 0, 0, 1])
        placed = y.index_put((rows,), y[rows] ** 2, accumulate=True)
        median = y.median(dim=0).values + y.kthvalue(2, dim=0).values
        mixed = back.gather(-1, order) + summed * placed + spread + median + y.index_select(0, rows).sum(0)
        return torch.tanh(mixed / 8)


class MasksAndScans(nn.Module):
    """where, masked_fill, boolean indexing, masked_scatter, cumsum, cumprod, logcumsumexp, einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        mask = y > 0
        chosen = y[mask].sqrt()
        y = torch.where(mask, y, 0.1 * y.exp())
        y = y.masked_scatter(mask, chosen * 3)
        y[~mask] = y[~mask] * 0.5
        y = y.masked_fill(y > 2, -1.0).cumsum(-1) + y.cumprod(0) + y.logcumsumexp(-1) + y.cummax(0).values
        pairs = torch.einsum("bi,bj,bk->bij", y, y, y.tanh())
        return torch.tanh(torch.einsum("bij,bj->bi", pairs, y) / 50)


class ShapesAndViews(nn.Module):
    """Views of views, overlapping windows, expansions, rolls, and reductions that share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        windows = y.unfold(1, 3, 1)
        diagonal = torch.diag_embed(y).diagonal(offset=0, dim1=-2, dim2=-1)
        first, second, third = torch.tensor_split(y.movedim(0, 1), 3)
        joined = torch.cat([first.tanh(), second, third.roll(1, 0)]).T
        strided = y.as_strided((2, 2), (WIDTH, 2))
        expanded = y[:1].expand_as(y) * y.flip(0)
        reduced = y.var(0) + y.amax(0) + y.logsumexp(0) + y.prod(0) + y.norm(dim=0) + y.std()
        return windows.mean(-1).sum() * joined + diagonal * expanded + reduced + strided.square().mean()


class Embeddings(nn.Module):
    """An embedding with padding, one with sparse gradients, one with renormalisation in place, and a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.padded = nn.Embedding(9, WIDTH, padding_idx=0)
        self.sparse = nn.Embedding(9, WIDTH, sparse=True)
        self.bounded = nn.Embedding(9, WIDTH, max_norm=1.0)
        self.bag = nn.EmbeddingBag(9, WIDTH, mode="sum")
        self.head = nn.Bilinear(WIDTH, WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.padded(ids) * torch.sigmoid(self.sparse(ids)) + self.bounded(ids)
        return torch.tanh(self.head(x.sum(1), self.bag(ids)) / 4)


def sort_and_scatter() -> Step:
    """Return two blocks that sort and scatter."""
    return nn.Sequential(SortAndScatter(), SortAndScatter()), torch.randn(4, WIDTH), mean_of_squares


def masks_and_scans() -> Step:
    """Return a model of masks and scans."""
    return MasksAndScans(), torch.randn(4, WIDTH, requires_grad=True), mean_of_squares


def shapes_and_views() -> Step:
    """Return a model of views."""
    return ShapesAndViews(), torch.randn(4, WIDTH, requires_grad=True), mean_of_squares


def embeddings() -> Step:
    """Return a model of four kinds of embedding; one of their gradients is sparse."""
    return Embeddings(), torch.tensor([[0, 3, 3, 8], [1, 0, 5, 3]]), mean_of_squares


EXAMPLES = (
    Example("sort-and-scatter", sort_and_scatter, has_blocks=True),
    Example("masks-and-scans", masks_and_scans),
    Example("shapes-and-views", shapes_and_views),
    Example("embeddings", embeddings),
)
