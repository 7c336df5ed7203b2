"""Models that use torch's other machinery inside: checkpoint, compile, autograd.grad, torch.func, hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.engine.zoo.example import Example, Step, mean_of_squares, quiet_compilation
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Body(nn.Module):
    """What the blocks of this family wrap."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.dropout(nn.functional.gelu(self.first(self.norm(x)))))


class CheckpointsInside(nn.Module):
    """Blocks that already use torch.utils.checkpoint."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Body(dropout=0.2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class CountsCompiledCalls:
    """A compiler backend that runs aot_eager's graphs and counts the calls into them."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        def run(*args: Any) -> Any:
            self.num_calls += 1
            return compiled(*args)

        return run


class CompiledBlocks(nn.Module):
    """Blocks of which the middle one is compiled, in place or by a wrapper around it.

    ``num_compiled_calls`` shows that it stays compiled: a block that falls back to eager gives the same numbers.
    """

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        # Earlier models count against dynamo's limit of recompilations, past which it runs eagerly.
        torch.compiler.reset()
        self.blocks = nn.ModuleList(Body() for _ in range(3))
        self.backend = CountsCompiledCalls()
        if in_place:
            self.blocks[1].compile(backend=self.backend)
        else:
            self.blocks[1] = torch.compile(self.blocks[1], backend=self.backend)
        self.num_compiled_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        num_calls_before = self.backend.num_calls
        with quiet_compilation():
            for block in self.blocks:
                x = block(x)
        self.num_compiled_calls += self.backend.num_calls - num_calls_before
        return x


class Conditional(nn.Module):
    """A higher-order operator: torch.cond runs one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with quiet_compilation():
            hidden = torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.first(x),))
        return hidden * torch.tanh(self.second(x))


class ForceField(nn.Module):
    """Returns an energy and its derivative by the positions, taken with autograd.grad inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        # Evaluation calls this under no_grad too; a force needs a gradient all the same.
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            distances = positions[:, None] - positions[None]
            energy = self.energy(distances).sum()
            (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -gradient


class VectorisedMap(nn.Module):
    """Uses torch.func.vmap over its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.func.vmap(lambda row: torch.tanh(self.inner(row)) * row.sum())(x)
        return self.outer(rows.sin())


class OtherHooks(nn.Module):
    """Packs some of its saved tensors by hooks of its own, and keeps others on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Body(dropout=0.1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor.clone(),), lambda packed: packed[0]):
            x = self.blocks[1](x)
        with torch.autograd.graph.save_on_cpu():
            return self.blocks[2](x)


class TensorHooks(nn.Module):
    """Registers gradient hooks in forward: one changes a gradient, one keeps it, one retains it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Body() for _ in range(2))
        self.gradient_norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda grad: grad * 0.5)
                x.register_hook(lambda grad: self.gradient_norms.append(grad.norm().item()))
        return x


class NonPersistentBuffers(nn.Module):
    """Rotary angles in a buffer that the state dict leaves out, and a counter that it keeps."""

    angles: Tensor
    num_steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.rand(WIDTH), persistent=False)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.long))
        self.blocks = nn.ModuleList(Body() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        self.num_steps += 1
        for block in self.blocks:
            x = block(x * self.angles.cos() + x.roll(1, -1) * self.angles.sin())
        return x


def alone(kind: Callable[[], nn.Module]) -> Callable[[], Step]:
    """Return a way to build a model on a random matrix."""
    return lambda: (kind(), torch.randn(4, WIDTH), mean_of_squares)


def force_field() -> Step:
    """Return a model trained on energies and forces: its loss differentiates a gradient."""
    return ForceField(), torch.randn(4, 3), lambda outputs: outputs[0] + mean_of_squares(outputs[1])


EXAMPLES = (
    Example("checkpoint-inside", alone(partial(CheckpointsInside, False)), has_blocks=True),
    Example("checkpoint-inside-reentrant", alone(partial(CheckpointsInside, True))),
    Example("compiled-block", alone(partial(CompiledBlocks, True)), has_blocks=True),
    Example("compiled-block-wrapped", alone(partial(CompiledBlocks, False)), has_blocks=True),
    Example("conditional", alone(Conditional)),
    Example("force-field", force_field),
    Example("vectorised-map", alone(VectorisedMap)),
    Example("other-saved-tensor-hooks", alone(OtherHooks), has_blocks=True),
    Example("tensor-hooks", alone(TensorHooks), has_blocks=True),
    Example("non-persistent-buffers", alone(NonPersistentBuffers), has_blocks=True),
)
