"""A U-Net: down to small images and back up, with skips across; its early features live through the whole step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.capture.step_arguments import Loss
from memfit.validation import check_divides, check_sizes

_NUM_GROUPS = 8


class ConvolutionPair(nn.Module):
    """Two convolutions, each with group norm and SiLU."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, padding=1),
            nn.GroupNorm(_NUM_GROUPS, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(_NUM_GROUPS, channels),
            nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of ``x``."""
        features: Tensor = self.layers(x)
        return features


class UNet(nn.Module):
    """Noisy images in, their noise out."""

    def __init__(self, depth: int, width: int, channels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            ConvolutionPair(before, after) for before, after in zip([channels, *widths[:-2]], widths[:-1], strict=True)
        )
        self.bottom = ConvolutionPair(widths[-2], widths[-1])
        self.up = nn.ModuleList(
            ConvolutionPair(widths[level + 1] + widths[level], widths[level]) for level in reversed(range(depth))
        )
        self.head = nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the noise in ``x``."""
        skips = []
        for pair in self.down:
            x = pair(x)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.bottom(x)
        for pair in self.up:
            larger = functional.interpolate(x, scale_factor=2.0)
            x = pair(torch.cat([larger, skips.pop()], dim=1))
        noise: Tensor = self.head(x)
        return noise


def unet(
    depth: int = 3, width: int = 32, batch: int = 4, size: int = 64, channels: int = 3
) -> tuple[nn.Module, Tensor, Loss]:
    """Return a U-Net that halves images ``depth`` times, random images for it, and its loss."""
    check_sizes(depth=depth, width=width, batch=batch, size=size, channels=channels)
    check_divides(_NUM_GROUPS, "8, the number of norm groups,", width, "width")
    check_divides(2**depth, "2 ** depth", size, "size")
    noise = torch.randn(batch, channels, size, size)
    return (
        UNet(depth, width, channels),
        torch.randn(batch, channels, size, size),
        lambda predicted: functional.mse_loss(predicted, noise.to(predicted.device)),
    )
