"""A residual network of basic blocks with batch norm, in four stages, each half as wide and high as the one before."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.capture.step_arguments import Loss
from memfit.validation import check_sizes

_NUM_STAGES = 4


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, and a short cut around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.convolution2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.short_cut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.short_cut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's features."""
        inner = functional.relu(self.norm1(self.convolution1(x)), inplace=True)
        return functional.relu(self.norm2(self.convolution2(inner)) + self.short_cut(x), inplace=True)


class ResNet(nn.Module):
    """Images in, class scores out."""

    def __init__(self, blocks: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        stages, channels_in = [], width
        for stage in range(_NUM_STAGES):
            channels = width * 2**stage
            for block in range(blocks):
                stages.append(ResidualBlock(channels_in, channels, stride=2 if stage and not block else 1))
                channels_in = channels
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(channels_in, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of ``images``."""
        scores: Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return scores


def resnet(
    blocks: int = 2, width: int = 32, batch: int = 16, size: int = 64, classes: int = 10
) -> tuple[nn.Module, Tensor, Loss]:
    """Return a ResNet with ``blocks`` blocks in each of four stages, random images for it, and its loss."""
    check_sizes(blocks=blocks, width=width, batch=batch, size=size, classes=classes)
    targets = torch.randint(classes, (batch,))
    return (
        ResNet(blocks, width, classes),
        torch.randn(batch, 3, size, size),
        lambda scores: functional.cross_entropy(scores, targets.to(scores.device)),
    )
