"""Convolutional models: a ResNet with batch norm, a U-Net with skips, and every kind of convolution."""

from __future__ import annotations

from functools import partial

import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm and in-place ReLUs around a residual, as torchvision writes it."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_channels)
        self.conv2 = nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    """A stem, three residual blocks with a pooling between, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*(ResidualBlock(6) for _ in range(3)))
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(self.blocks(self.stem(images)))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet(dtype: torch.dtype = torch.float32, memory_format: torch.memory_format = torch.contiguous_format) -> Step:
    """Return a classifier of four random images."""
    model = ResNet().to(dtype).to(memory_format=memory_format)
    images = torch.randn(4, 3, 14, 14, dtype=dtype).contiguous(memory_format=memory_format)
    targets = torch.randint(5, (4,))
    return model, images, partial(nn.functional.cross_entropy, target=targets)


class DoubleConvolution(nn.Module):
    """What a U-Net does at each of its levels."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, padding=1),
            nn.BatchNorm2d(num_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(num_out, num_out, 3, padding=1),
            nn.GroupNorm(2, num_out),
            nn.SiLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class UNet(nn.Module):
    """Two levels down, two up; what a level down makes is concatenated on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([DoubleConvolution(2, 4), DoubleConvolution(4, 6)])
        self.bottom = DoubleConvolution(6, 8)
        self.grow = nn.ModuleList([nn.ConvTranspose2d(8, 6, 2, stride=2), nn.ConvTranspose2d(6, 4, 2, stride=2)])
        self.up = nn.ModuleList([DoubleConvolution(12, 6), DoubleConvolution(8, 4)])
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips = []
        x = image
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, level in zip(self.grow, self.up, strict=True):
            x = level(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)


def unet() -> Step:
    """Return a segmenter of random images."""
    targets = torch.rand(2, 1, 8, 8)
    loss = partial(nn.functional.binary_cross_entropy_with_logits, target=targets)
    return UNet(), torch.randn(2, 2, 8, 8), loss


class EveryConvolution(nn.Module):
    """1-d, 3-d, grouped, dilated and transposed convolutions, padding modes, pooling and resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.along_line = nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular", groups=2)
        self.in_volume = nn.Conv3d(2, 4, 3, padding=1)
        self.grow_line = nn.ConvTranspose1d(4, 3, 4, stride=2, padding=1)
        self.grow_volume = nn.ConvTranspose3d(4, 2, 2, stride=2)
        self.dilated = nn.Conv2d(3, 4, 3, dilation=2, padding=2, padding_mode="reflect")
        self.instance_norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)

    def forward(self, line: Tensor, image: Tensor, volume: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        functional = nn.functional
        line = self.grow_line(functional.leaky_relu(self.along_line(line)))
        image = functional.elu(self.instance_norm(self.dilated(image)))
        image = functional.interpolate(image, scale_factor=1.5, mode="bilinear", align_corners=False)
        image = functional.avg_pool2d(functional.pixel_shuffle(image, 2), 2)
        volume = self.grow_volume(functional.softplus(self.in_volume(volume)))
        volume = functional.interpolate(functional.max_pool3d(volume, 2), scale_factor=2, mode="trilinear")
        return line, image, volume


def every_convolution() -> Step:
    """Return a model of many convolutions whose inputs require gradients too."""
    batch = tuple(torch.randn(shape, requires_grad=True) for shape in ((2, 4, 9), (2, 3, 6, 6), (1, 2, 3, 4, 5)))
    return EveryConvolution(), batch, lambda outputs: sum(mean_of_squares(output) for output in outputs)


class UnusualBatchNorms(nn.Module):
    """Batch norms of which some are frozen, some without statistics, some with a cumulative average."""

    def __init__(self) -> None:
        super().__init__()
        self.cumulative = nn.BatchNorm1d(5, momentum=None)
        self.without_statistics = nn.BatchNorm1d(5, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(5)
        self.linear = nn.Linear(5, 5)

    def train(self, mode: bool = True) -> UnusualBatchNorms:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.cumulative(x))
        x = self.without_statistics(x).tanh()
        # The same norm twice: its statistics move twice in one step.
        return self.cumulative(self.frozen(x))


def batch_norms() -> Step:
    """Return a model of unusual batch norms."""
    return UnusualBatchNorms(), torch.randn(6, 5), mean_of_squares


EXAMPLES = (
    Example("resnet", resnet, has_blocks=True),
    Example("resnet-fp64", partial(resnet, torch.float64), has_blocks=True),
    Example("resnet-bf16", partial(resnet, torch.bfloat16), has_blocks=True),
    Example("resnet-channels-last", partial(resnet, memory_format=torch.channels_last), has_blocks=True),
    Example("unet", unet, has_blocks=True),
    Example("every-convolution", every_convolution),
    Example("batch-norms", batch_norms),
)
