"""Small models whose blocks are compiled in tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 32


class DropoutBlock(nn.Module):
    """An MLP with dropout inside, and a batch norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with what the MLP adds."""
        hidden = self.dropout(nn.functional.gelu(self.up(x)))
        return x + self.norm(self.dropout(self.down(hidden)))


class DropoutModel(nn.Module):
    """Blocks in bfloat16 autocast; the mean square of what they return."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(DropoutBlock() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        x = self.into(x)
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                x = block(x)
        return x.float().square().mean()


class SmallBlock(nn.Module):
    """Three matrix products: compiling it takes no C++ compiler. With an odd ``number``, the graph is another one."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.across = nn.Linear(2 * WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` through the layers, the middle one transposed where the number is odd."""
        x = self.up(x)
        return self.down(x @ self.across.weight if self.number % 2 else self.across(x))


class SmallBlocks(nn.Module):
    """Blocks that compile fast, with numbers from 0 or all with number 0."""

    def __init__(self, num_blocks: int = 3, *, are_numbered: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(SmallBlock(number if are_numbered else 0) for number in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class PooledBlock(nn.Module):
    """Reads its input also in four windows, whose size is the input's."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` through a matrix that is made of the means of its windows."""
        pooled = nn.functional.adaptive_avg_pool2d(x[None], (2, 2))[0]
        return x @ (self.into @ pooled @ self.out)


class OutputBlock(nn.Module):
    """Reads its own output, so that it may save it, and reads its input by a frozen layer, which does not."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.made = nn.Linear(WIDTH, WIDTH, bias=False)
        self.read = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and what a layer makes of it."""
        output = self.made(self.frozen(x))
        return output, self.read(output)


class PassedOnBlock(nn.Module):
    """Returns what it read as well, which the next block passes on to nobody and does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the output, and what it is made from."""
        hidden = self.up(both[0])
        return self.down(hidden), hidden


class PassedOnBlocks(nn.Module):
    """Blocks that are given more than they read."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(PassedOnBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        x = self.into(x)
        both = x, x
        for block in self.blocks:
            both = block(both)
        return both[0].square().mean() + both[1].mean()


class CountingBlock(nn.Module):
    """Counts its calls, in Python, and reads the count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` through the layer."""
        self.num_calls += 1
        return self.linear(x)


class OutputBlocks(nn.Module):
    """Blocks that may save their outputs; the mean square of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(OutputBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        x, loss = self.into(x), torch.zeros(())
        for block in self.blocks:
            x, read = block(x)
            loss = loss + read.mean()
        return loss + x.square().mean()


class Stem(nn.Module):
    """A wide MLP, whose activations take more memory than several of the small blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16 * WIDTH)
        self.norm = nn.LayerNorm(16 * WIDTH)
        self.down = nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` through the layers."""
        return self.down(self.norm(nn.functional.gelu(self.up(x))))


class WideEnds(nn.Module):
    """Small blocks between a wide stem and a wide tail, which are not repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()
        self.blocks = nn.ModuleList(SmallBlock() for _ in range(4))
        self.tail = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.SiLU(), nn.Linear(8 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(x).square().mean()


class ExpertsBlock(nn.Module):
    """Experts of which each token uses the one that its router chooses, and a buffer that counts its tokens."""

    num_experts = 3

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, self.num_experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.num_experts))
        self.register_buffer("num_tokens", torch.zeros(self.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with what the chosen experts add."""
        weights, chosen = self.router(x).softmax(-1).max(-1)
        one_hot = nn.functional.one_hot(chosen, self.num_experts)
        with torch.no_grad():
            self.num_tokens += one_hot.sum(0)
        made = torch.stack([expert(x) for expert in self.experts], -1)
        return x + (made * (one_hot * weights[:, None])[:, None, :]).sum(-1)


class Experts(nn.Module):
    """Blocks with experts; the mean square of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ExpertsBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class BranchingBlock(nn.Module):
    """Branches on a number that it computes, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` through a layer, doubled where it has many positive elements."""
        return self.linear(x) * 2 if (x > 0).sum() > 8 else self.linear(x)


class RoutingBlock(nn.Module):
    """An expert that runs on as many tokens as its router sends it, if it sends any."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 1)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with what the expert adds."""
        chosen = (self.router(x).squeeze(-1) > 0).nonzero().squeeze(-1)
        return x.index_add(0, chosen, self.expert(x[chosen])) if chosen.numel() else x


def dropout_model() -> tuple[nn.Module, Tensor]:
    """Return the model and a batch."""
    torch.manual_seed(0)
    return DropoutModel(), torch.randn(512, WIDTH)


def outputs_model() -> tuple[nn.Module, Tensor]:
    """Return the model and a batch."""
    torch.manual_seed(0)
    return OutputBlocks(), torch.randn(512, WIDTH)


def passed_on_model() -> tuple[nn.Module, Tensor]:
    """Return the model and a batch."""
    torch.manual_seed(0)
    return PassedOnBlocks(), torch.randn(512, WIDTH)


def wide_ends_model() -> tuple[nn.Module, Tensor]:
    """Return the model and a batch."""
    torch.manual_seed(0)
    return WideEnds(), torch.randn(512, WIDTH)


def experts_model() -> tuple[nn.Module, Tensor]:
    """Return the model and a batch."""
    torch.manual_seed(0)
    return Experts(), torch.randn(256, WIDTH)


def small_model() -> tuple[SmallBlocks, Tensor]:
    """Return the model and a batch."""
    torch.manual_seed(0)
    return SmallBlocks(), torch.randn(256, WIDTH)
