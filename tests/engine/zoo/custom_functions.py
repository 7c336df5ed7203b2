"""Models with their own autograd.Function: saving, mark_dirty, no gradient, foreign kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

WIDTH = 6


class Swish(torch.autograd.Function):
    """Saves an input, an output and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        gate = torch.sigmoid(slope * x)
        ctx.slope = slope
        y = x * gate
        ctx.save_for_backward(x, gate, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _, gate, y = ctx.saved_tensors
        return grad * (gate + ctx.slope * y * (1 - gate)), None


class AddAndDouble(torch.autograd.Function):
    """Changes its first argument in place and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.add_(y).mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * grad, 2 * grad


class LargestWithPlace(torch.autograd.Function):
    """Has a second output that is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.max(-1, keepdim=True)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return values, places

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter_(-1, places, grad)


class NumpyKernel(torch.autograd.Function):
    """Fills its outputs by NumPy through raw memory: no dispatcher sees what is written.

    Stands for every Triton or C++ kernel. Its saved tensor comes from ``empty``, which no replay brings back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        cosine, sine = torch.empty_like(x), torch.empty_like(x)
        np.cos(x.detach().numpy(), out=cosine.numpy())
        np.sin(x.detach().numpy(), out=sine.numpy())
        ctx.save_for_backward(cosine)
        return sine

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (cosine,) = ctx.saved_tensors
        return grad * cosine


class StraightThrough(torch.autograd.Function):
    """Rounds forward, passes gradients through; keeps a tensor on the context without save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.inside = x.abs() < 2
        return x.round()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return grad * ctx.inside


class RunsAgain(torch.autograd.Function):
    """Calls a module in forward and once more in backward, as reversible networks and old checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.module(x).backward(grad)
        return x.grad, None


class Reversible(nn.Module):
    """A block around a body that runs in forward and again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(RunsAgain.apply(x, self.body))


def reversible() -> Step:
    """Return a linear layer and three blocks that run again in backward."""
    blocks = (Reversible() for _ in range(3))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks), torch.randn(5, WIDTH), mean_of_squares


class Applies(nn.Module):
    """A linear layer, then a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


class RawKernelOutput(nn.Module):
    """Lets a raw kernel write into what it returns, outside of any autograd.Function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = 1.5 * torch.tanh(self.linear(x))
        numbers = hidden.detach().numpy()
        np.add(numbers, 1, out=numbers)
        return hidden


def raw_kernel_writes_output() -> Step:
    """Return three blocks whose outputs are not what the last op that torch knows of has made."""
    return nn.Sequential(*(RawKernelOutput() for _ in range(3))), torch.randn(5, WIDTH), mean_of_squares


def add_and_double(x: Tensor) -> Tensor:
    """Change a fresh product in place."""
    return AddAndDouble.apply(x * 1.5, x.sin())


def scale_by_largest(x: Tensor) -> Tensor:
    """Use both outputs of a function, the differentiable one and the other."""
    values, places = LargestWithPlace.apply(x)
    return torch.tanh(x * values + places)


def numpy_kernel(x: Tensor) -> Tensor:
    """Use what a foreign kernel wrote in ops that keep it."""
    return NumpyKernel.apply(x * 2).exp()


def chain(function: Callable[[Tensor], Tensor]) -> Callable[[], Step]:
    """Return a way to build three blocks that apply ``function``."""
    return lambda: (
        nn.Sequential(*(Applies(function) for _ in range(3))),
        torch.randn(5, WIDTH),
        mean_of_squares,
    )


EXAMPLES = (
    Example("function-saving-tensors", chain(lambda x: Swish.apply(x, 1.7)), has_blocks=True),
    Example("function-marking-dirty", chain(add_and_double), has_blocks=True),
    Example("function-with-non-differentiable-output", chain(scale_by_largest), has_blocks=True),
    Example("function-with-foreign-kernel", chain(numpy_kernel), has_blocks=True),
    Example("raw-kernel-writes-output", raw_kernel_writes_output, has_blocks=True),
    Example("function-running-a-module-again", reversible, has_blocks=True),
    Example("function-straight-through", chain(lambda x: StraightThrough.apply(3 * x) * x.cos()), has_blocks=True),
)
