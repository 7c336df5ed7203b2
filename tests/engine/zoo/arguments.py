"""Ways to call a model: keywords, nested containers, things that are no tensors, and several outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares
from torch import Tensor, nn

WIDTH = 6


@dataclass
class Scores:
    """What a model of this family returns, as a dataclass."""

    values: Tensor
    hidden: list[Tensor]
    name: str


class Window(NamedTuple):
    """A tensor with a number, handed around as a tuple."""

    tensor: Tensor
    scale: float


class KeywordBlock(nn.Module):
    """Takes positional, optional, keyword-only and non-tensor arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        activation: str,
        options: dict[str, Any],
        power: int = 2,
    ) -> tuple[Tensor, dict[str, Any]]:
        y = getattr(torch, activation)(self.linear(x)) ** power
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return y * options["windows"][0].scale + options["windows"][0].tensor, {
            "mean": y.mean(),
            "none": None,
        }


class Nested(nn.Module):
    """Gets a nested batch by keywords and returns a dataclass with a list inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeywordBlock() for _ in range(3))

    def forward(
        self, inputs: dict[str, Any], *, activation: str, flags: tuple[bool, None] = (True, None)
    ) -> dict[str, Any]:
        x = inputs["pair"][0] + inputs["pair"][1]
        hidden = []
        for number, block in enumerate(self.blocks):
            mask = inputs["mask"] if number % 2 else None
            x, extra = block(x, mask, activation=activation, options=inputs["options"], power=number + 1)
            hidden.append(extra["mean"])
        return {"scores": Scores(x, hidden, activation), "flag": flags[0], "count": len(hidden)}


def nested_arguments() -> Step:
    """Return a model that is called by keywords, with tensors that require gradients inside containers."""
    pair = (torch.randn(3, WIDTH, requires_grad=True), torch.randn(3, WIDTH))
    options = {"windows": [Window(torch.randn(WIDTH, requires_grad=True), 0.5)], "unused": "text"}
    inputs = {"pair": pair, "mask": torch.rand(3, WIDTH) > 0.7, "options": options}
    batch = {"inputs": inputs, "activation": "sin", "flags": (True, None)}

    def loss(output: dict[str, Any]) -> Tensor:
        return mean_of_squares(output["scores"].values) + sum(output["scores"].hidden)

    return Nested(), batch, loss


class Pair(nn.Module):
    """Two towers that exchange what they make; each block takes and returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        left, right = both
        new_left = left + torch.tanh(self.right(right))
        return new_left, right + nn.functional.silu(self.left(new_left))


class ManyOutputs(nn.Module):
    """Returns tensors of several kinds: one of them twice, one the input itself, one unused by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Pair() for _ in range(3)))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        left, right = self.blocks((x, x.flip(0)))
        order = left.sum(-1).argsort()
        return left, (right, left), order, [self.unused(right), None, "text", 3], x


def many_outputs() -> Step:
    """Return a model of two towers with many outputs."""

    def loss(outputs: tuple[Any, ...]) -> Tensor:
        left, (right, _), order, _, _ = outputs
        return mean_of_squares(left[order]) + (right * left).mean()

    return ManyOutputs(), (torch.randn(4, WIDTH, requires_grad=True),), loss


class ScalarLoss(nn.Module):
    """Computes its own loss, of no dimension, and returns it under the name ``loss``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softplus(), nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(logits, targets, label_smoothing=0.1), "logits": logits}


def loss_in_output() -> Step:
    """Return a model that returns its loss in a dict, on a batch that is a dict."""
    return ScalarLoss(), {"x": torch.randn(5, WIDTH), "targets": torch.randint(3, (5,))}, None


class EmptyTensors(nn.Module):
    """Meets batches without rows and tensors without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        nothing = torch.relu(self.linear(x[:0]))
        something = torch.relu(self.linear(x))
        return torch.cat([something, nothing]).exp()


def empty_tensors() -> Step:
    """Return a model in which a branch has no rows."""
    return EmptyTensors(), torch.randn(3, WIDTH), mean_of_squares


EXAMPLES = (
    Example("nested-arguments", nested_arguments, has_blocks=True),
    Example("many-outputs", many_outputs, has_blocks=True),
    Example("loss-in-output", loss_in_output),
    Example("empty-tensors", empty_tensors),
)
