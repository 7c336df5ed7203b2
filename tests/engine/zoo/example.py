"""What an entry of the zoo is: a name and a way to build one tiny training step. No model lives here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Any], Tensor]
Step = tuple[nn.Module, Any, Loss | None]

BUILD_SEED = 20240229


@dataclass(frozen=True)
class Example:
    """One model of the zoo.

    ``make`` returns a model, a batch for it and a loss, or None where memfit's default loss applies.
    ``has_blocks`` says whether the model has repeated blocks with several ops inside, so that a layer strategy
    has something to drop.
    ``context`` is entered around forward and loss, for autocast.
    """

    name: str
    make: Callable[[], Step]
    has_blocks: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def build(self) -> Step:
        """Return the step, bit for bit the same one at every call."""
        torch.manual_seed(BUILD_SEED)
        return self.make()

    def __str__(self) -> str:
        return self.name


@contextmanager
def quiet_compilation() -> Iterator[None]:
    """Let torch.compile and torch.cond compile where warnings are errors.

    dynamo reads ``.grad`` of a graph's inputs while it compiles, and torch warns of that.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        yield


def mean_of_squares(output: Tensor) -> Tensor:
    """Return a scalar whose gradient differs from element to element, which a plain mean's does not."""
    return (output * output).mean()


def cross_entropy_with(targets: Tensor) -> Loss:
    """Return a loss that compares logits in their last dimension with ``targets``."""

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())

    return loss
