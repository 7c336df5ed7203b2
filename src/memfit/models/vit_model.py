"""A vision transformer: images cut into patches, each patch a token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.capture.step_arguments import Loss
from memfit.models.attention import TransformerBlock
from memfit.validation import check_divides, check_sizes


class VisionTransformer(nn.Module):
    """Images in, class scores out."""

    def __init__(self, layers: int, width: int, heads: int, size: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, is_causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of ``images``."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x).mean(1))
        return scores


def vit(
    layers: int = 6,
    width: int = 192,
    heads: int = 3,
    batch: int = 8,
    size: int = 96,
    patch: int = 8,
    classes: int = 10,
) -> tuple[nn.Module, Tensor, Loss]:
    """Return a vision transformer, random images for it, and its loss."""
    check_sizes(layers=layers, width=width, heads=heads, batch=batch, size=size, patch=patch, classes=classes)
    check_divides(heads, "heads", width, "width")
    check_divides(patch, "patch", size, "size")
    targets = torch.randint(classes, (batch,))
    return (
        VisionTransformer(layers, width, heads, size, patch, classes),
        torch.randn(batch, 3, size, size),
        lambda scores: functional.cross_entropy(scores, targets.to(scores.device)),
    )
