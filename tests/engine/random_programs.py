"""Random models: short programs on a pool of 3×3 matrices, each instruction a module of its own, in stages.

They mix what goes wrong together rather than alone: writes in place and through views, random draws, buffers that
change, detached branches, and matrices that are used again long after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tests.engine.zoo.example import Step
from torch import Tensor, nn

SIZE = 3
Pool = list[Tensor]


@dataclass(frozen=True)
class Instruction:
    """What to do (a name in INSTRUCTIONS) with which matrices of the pool, counted from its end."""

    name: str
    first: int
    second: int

    def __repr__(self) -> str:
        return f"{self.name}({self.first}, {self.second})"


class Operation(nn.Module):
    """Runs one instruction, with a weight and a buffer of its own for those that want one."""

    buffer: Tensor

    def __init__(self, instruction: Instruction) -> None:
        super().__init__()
        self.instruction = instruction
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 2)
        self.register_buffer("buffer", torch.rand(SIZE, SIZE))

    def forward(self, pool: Pool) -> None:
        left = pool[-1 - self.instruction.first % len(pool)]
        right = pool[-1 - self.instruction.second % len(pool)]
        made = INSTRUCTIONS[self.instruction.name](self, left, right)
        if made is not None:
            pool.append(made)


def write_without_gradient(operation: Operation, left: Tensor, right: Tensor) -> None:
    with torch.no_grad():
        left.add_(right.detach(), alpha=0.1)


def write_a_row(operation: Operation, left: Tensor, right: Tensor) -> Tensor:
    copy = left.clone()
    copy[1] = right[0]
    return copy


def read_and_update_buffer(operation: Operation, left: Tensor, right: Tensor) -> Tensor:
    read = left * (2 * operation.buffer)
    operation.buffer.lerp_(right.detach().sigmoid(), 0.3)
    return read * (operation.buffer + 1)


def normalise(operation: Operation, left: Tensor, right: Tensor) -> Tensor:
    return nn.functional.layer_norm(left, (SIZE,), operation.weight[0], operation.weight[1])


def normalise_by_batch(operation: Operation, left: Tensor, right: Tensor) -> Tensor:
    mean, variance = operation.buffer[0], operation.buffer[1]
    return nn.functional.batch_norm(left, mean, variance, training=operation.training)


INSTRUCTIONS: dict[str, Callable[[Operation, Tensor, Tensor], Tensor | None]] = {
    "tanh": lambda operation, left, right: left.tanh(),
    "sin": lambda operation, left, right: left.sin(),
    "gelu": lambda operation, left, right: nn.functional.gelu(left),
    "softmax": lambda operation, left, right: left.softmax(-1),
    "linear": lambda operation, left, right: nn.functional.linear(left, operation.weight),
    "add": lambda operation, left, right: left + right,
    "multiply": lambda operation, left, right: left * right.sigmoid(),
    "product": lambda operation, left, right: (left @ right).tanh(),
    "shift": lambda operation, left, right: left + 0.5,
    "normalise": normalise,
    "normalise_by_batch": normalise_by_batch,
    "transpose": lambda operation, left, right: left.T,
    "flatten_and_back": lambda operation, left, right: left.reshape(-1).view(SIZE, SIZE),
    "flip": lambda operation, left, right: left.flip(0),
    "first_row": lambda operation, left, right: left[:1].expand(SIZE, SIZE),
    "clone": lambda operation, left, right: left.clone(),
    "detach": lambda operation, left, right: left.detach(),
    "detached_copy": lambda operation, left, right: 1.5 * left.detach(),
    "dropout": lambda operation, left, right: nn.functional.dropout(left, 0.4, training=operation.training),
    "noise": lambda operation, left, right: left + torch.randn_like(right),
    "mask": lambda operation, left, right: left * torch.empty(SIZE, SIZE).bernoulli_(0.5),
    "sorted": lambda operation, left, right: left.sort(-1).values,
    "chosen": lambda operation, left, right: torch.where(right > 0, left, right.cos()),
    "scale_in_place": lambda operation, left, right: void(left.mul_(0.9)),
    "shift_in_place": lambda operation, left, right: void(left.add_(right.detach())),
    "add_in_place": lambda operation, left, right: void(left.add_(right)),
    "relu_in_place": lambda operation, left, right: void(nn.functional.relu_(left)),
    "row_in_place": lambda operation, left, right: void(left[0].mul_(2)),
    "column_in_place": lambda operation, left, right: void(left.T[1].add_(1)),
    "fill_in_place": lambda operation, left, right: void(left.masked_fill_(right > 0.5, 0.1)),
    "draw_in_place": lambda operation, left, right: void(left.detach().uniform_()),
    "write_without_gradient": write_without_gradient,
    "write_a_row": write_a_row,
    "read_and_update_buffer": read_and_update_buffer,
    "own_weight": lambda operation, left, right: left * operation.weight.exp(),
}


def void(_: object) -> None:
    """Return nothing: the instruction changed a matrix of the pool and made no new one."""


class Stage(nn.Module):
    """A block of the program: a few instructions that run one after another."""

    def __init__(self, instructions: list[Instruction]) -> None:
        super().__init__()
        self.operations = nn.ModuleList(Operation(instruction) for instruction in instructions)

    def forward(self, pool: Pool) -> None:
        for operation in self.operations:
            operation(pool)


class Program(nn.Module):
    """Runs stages one after another and returns all matrices that there are in the end."""

    def __init__(self, stages: list[list[Instruction]]) -> None:
        super().__init__()
        self.inlet = nn.Parameter(torch.randn(SIZE, SIZE))
        self.stages = nn.ModuleList(Stage(instructions) for instructions in stages)

    def forward(self, x: Tensor) -> Pool:
        pool = [x * self.inlet, x.clone()]
        for stage in self.stages:
            stage(pool)
        return pool


def loss_of_pool(pool: Pool) -> Tensor:
    """Return a scalar that depends on every matrix of the pool."""
    return torch.stack([matrix.float().square().mean() for matrix in pool]).sum()


def build(stages: list[list[Instruction]]) -> Step:
    """Return the step of a program, the same at every call."""
    torch.manual_seed(0)
    return Program(stages), torch.randn(SIZE, SIZE), loss_of_pool
