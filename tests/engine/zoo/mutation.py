"""In-place ops of every kind: residuals, activations, lists, closures, views, hidden writes and the batch.

Each of these models is right in plain autograd. A recompute that reads a tensor after it was changed is not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares
from torch import Tensor, nn

WIDTH = 7


class TanhBlock(nn.Module):
    """A linear layer and a tanh; autograd saves the block's own output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class ShiftedGeluBlock(nn.Module):
    """A shift, norm, linear, GELU, linear. The shift saves nothing, so that the input may be overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.gelu(self.first(self.norm(x + 1))))


class InPlaceResiduals(nn.Module):
    """``x += block(x)`` between blocks, in the model's own forward: each block's input changes after its use."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ShiftedGeluBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x += block(x)
        return x


class InPlaceActivations(nn.Module):
    """Activations that overwrite their input, and chains of in-place arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), activation) for activation in self.activations())
        )

    @staticmethod
    def activations() -> list[nn.Module]:
        return [
            nn.ReLU(inplace=True),
            nn.LeakyReLU(0.1, inplace=True),
            nn.ELU(inplace=True),
            nn.SiLU(inplace=True),
            nn.Hardtanh(-0.5, 0.5, inplace=True),
            nn.Dropout(0.2, inplace=True),
            nn.Threshold(0.05, 0.0, inplace=True),
        ]

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return x.mul_(2).add_(1).sigmoid_()


class WritesThroughViews(nn.Module):
    """Overwrites part of a view of an activation that several ops have used already."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * 1.5
        shifted = y + 3
        y[:, 2:4] = shifted[:, 0:2]
        y[0].zero_()
        y.view(-1)[::3] += 1
        column = y.select(1, 5)
        column.copy_(shifted[:, 6])
        y.masked_fill_(y > 2, 0.5)
        return self.head(y) + shifted.clamp_(max=4)


class ListMutatedBetweenBlocks(nn.Module):
    """Blocks read a tensor out of a list; the model changes it with ``add_`` before the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReadsList() for _ in range(3))

    def forward(self, x: Tensor, carried: list[Tensor]) -> Tensor:
        for block in self.blocks:
            x = block(x, carried)
            carried[0].add_(1)
        return x


class ReadsList(nn.Module):
    """Mixes its input with the first tensor of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, carried: list[Tensor]) -> Tensor:
        # 2 * carried is a fresh tensor: autograd keeps that one and lets carried[0] change.
        return torch.tanh(self.linear(x) * (2 * carried[0]))


class KeywordMutatedAfterUse(nn.Module):
    """A keyword argument is changed once the blocks have read it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReadsKeyword() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.linspace(-1, 1, WIDTH)
        for block in self.blocks:
            x = block(x, shift=shift)
        shift.fill_(100)
        return x


class ReadsKeyword(nn.Module):
    """Shifts by a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        return torch.sin(self.linear(x) + shift)


class ReadsClosure(nn.Module):
    """Scales by a tensor that only a closure knows."""

    def __init__(self, read_scale: Callable[[], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.read_scale = read_scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(self.linear(x) * self.read_scale().exp())


class ClosureMutatedAfterUse(nn.Module):
    """Blocks close over a tensor that the model overwrites between them."""

    def __init__(self) -> None:
        super().__init__()
        scale = torch.linspace(-1, 1, WIDTH)
        self.scale = scale
        self.blocks = nn.ModuleList(ReadsClosure(lambda: scale) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            self.scale.mul_(-0.5)
        return x


class HiddenWrites(nn.Module):
    """Writes by ways that autograd does not watch: ``.data``, ``detach()``, ``out=`` and a reused scratch buffer."""

    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scratch", torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        carried = 2 * x
        y = torch.tanh(self.first(x) * (carried + 1))
        carried.data.add_(5)
        y = torch.tanh(self.second(y) * (carried + 1))
        carried.detach().mul_(0.5)
        for _ in range(3):
            with torch.no_grad():
                torch.mul(y, 2, out=self.scratch)
            y = torch.tanh(self.first(y) * (self.scratch + 1)) + carried.clone()
        return y


class BatchOverwritten(nn.Module):
    """Overwrites its own input, as a preprocessing step in place does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TanhBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(x.mean()).div_(x.std())
        y = x * 2
        for block in self.blocks:
            y = y + block(y)
            x.add_(0.1)
        return y * x.clone()


def alone(kind: Callable[[], nn.Module]) -> Callable[[], Step]:
    """Return a way to build a model on a random matrix."""
    return lambda: (kind(), torch.randn(4, WIDTH), mean_of_squares)


def list_mutated_between_blocks() -> Step:
    """Return a model that changes a tensor in a list that came with its batch."""
    return ListMutatedBetweenBlocks(), (torch.randn(4, WIDTH), [torch.rand(WIDTH)]), mean_of_squares


EXAMPLES = (
    Example("in-place-residuals", alone(InPlaceResiduals), has_blocks=True),
    Example("in-place-activations", alone(InPlaceActivations), has_blocks=True),
    Example("in-place-on-views", alone(WritesThroughViews)),
    Example("list-mutated-between-blocks", list_mutated_between_blocks, has_blocks=True),
    Example("keyword-mutated-after-use", alone(KeywordMutatedAfterUse), has_blocks=True),
    Example("closure-mutated-after-use", alone(ClosureMutatedAfterUse), has_blocks=True),
    Example("hidden-writes", alone(HiddenWrites)),
    Example("batch-overwritten", alone(BatchOverwritten), has_blocks=True),
)
