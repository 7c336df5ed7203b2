"""Runs training steps and compares two runs bit for bit in everything that a user could look at.

A run becomes a trace: a dict from what was looked at ("step 1, gradient of head.weight") to what was seen.
Two traces are the same when every entry is, in type, layout and bits; NaN equals the same NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tests.engine.zoo.example import Loss, Step
from torch import Tensor, nn

RUN_SEED = 7
PLAIN_VALUES = (bool, int, float, complex, str, bytes, type(None))


class StepsDifferError(AssertionError):
    """Two runs are not the same; the message names the first thing that differs."""


@dataclass(frozen=True)
class SeenTensor:
    """A tensor as it was: its description and a copy of its numbers."""

    description: str
    numbers: Tensor

    def __repr__(self) -> str:
        return self.description

    def bits(self) -> Tensor:
        """Return the numbers as bytes, so that NaN and the sign of zero count."""
        dense = self.numbers.resolve_conj().resolve_neg().contiguous()
        return dense.reshape(-1).view(torch.uint8)


Trace = dict[str, Any]


def call(model: nn.Module, batch: Any) -> Any:
    """Call ``model`` as memfit does: a tuple or list by position, a dict by keyword, anything else alone."""
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(**batch) if isinstance(batch, dict) else model(batch)


def scalar_loss(output: Any, loss: Loss | None) -> Tensor:
    """Return the loss of ``output``, by memfit's default where there is none."""
    if loss is not None:
        return loss(output)
    if isinstance(output, Mapping):
        return output["loss"]
    return output


def leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield everything to compare inside of ``value``, with a path that names it."""
    if isinstance(value, Tensor):
        yield from seen(prefix, value)
    elif isinstance(value, PLAIN_VALUES):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(f"{prefix}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        yield f"length of {prefix}", len(value)
        for index, item in enumerate(value):
            yield from leaves(f"{prefix}[{index}]", item)
    elif isinstance(value, torch.Generator):
        yield from seen(f"{prefix}.state", value.get_state())
    elif hasattr(value, "__dict__") and not callable(value):
        for name, item in vars(value).items():
            yield from leaves(f"{prefix}.{name}", item)
    else:
        yield f"type of {prefix}", type(value).__name__


def seen(path: str, tensor: Tensor) -> Iterator[tuple[str, SeenTensor]]:
    """Yield a tensor as it is now; a sparse one as its places and its values."""
    if tensor.is_sparse:
        coalesced = tensor.detach().coalesce()
        # The strides of a sparse tensor's parts depend on how it was summed up, not on what it holds.
        yield from seen(f"{path}.indices", coalesced.indices().flatten())
        yield from seen(f"{path}.values", coalesced.values().flatten())
        return
    kind = str(tensor.dtype).removeprefix("torch.")
    description = f"{kind}{list(tensor.shape)}, strides {tensor.stride()}, requires_grad={tensor.requires_grad}"
    yield path, SeenTensor(description, tensor.detach().clone())


def batch_tensors(path: str, batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested batch."""
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, item in batch.items():
            yield from batch_tensors(f"{path}[{key!r}]", item)
    elif isinstance(batch, (list, tuple)):
        for index, item in enumerate(batch):
            yield from batch_tensors(f"{path}[{index}]", item)


def state_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield buffers and whatever else the modules keep: counters, caches, lists, generators."""
    for name, buffer in model.named_buffers():
        yield from seen(f"buffer {name}", buffer)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            # Names with an underscore are torch's own: parameters, hooks, submodules.
            if not name.startswith("_") and not callable(value):
                yield from leaves(f"attribute {path}.{name}".replace(" .", " "), value)


def gradients_of(model: nn.Module, batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the gradient of every parameter and of every input that requires one; None counts too."""
    for name, parameter in model.named_parameters():
        yield from leaves(f"gradient of {name}", parameter.grad)
    for name, tensor in batch_tensors("batch", batch):
        if tensor.requires_grad:
            yield from leaves(f"gradient of {name}", tensor.grad)


def clear_gradients(model: nn.Module, batch: Any) -> None:
    """Set all gradients to None, those of the batch too."""
    model.zero_grad(set_to_none=True)
    for _, tensor in batch_tensors("batch", batch):
        tensor.grad = None


def look(when: str, model: nn.Module, batch: Any = None, **things: Any) -> Trace:
    """Return all that can be seen now: ``things``, gradients, the modules' state, the batch, the random state."""
    entries = [
        *(entry for name, thing in things.items() for entry in leaves(name, thing)),
        *gradients_of(model, batch),
        *state_of(model),
        *leaves("batch", batch),
        *seen("random state", torch.get_rng_state()),
    ]
    return {f"{when}, {path}": entry for path, entry in entries}


def trace_steps(
    step: Step,
    *,
    num_steps: int = 3,
    training: bool = True,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Trace:
    """Run ``num_steps`` training steps from a fixed seed and return what was seen; the model is changed."""
    model, batch, loss = step
    model.train(training)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    update = (optimizer or (lambda given: torch.optim.SGD(given, lr=0.05)))(parameters) if parameters else None
    trace: Trace = {}
    torch.manual_seed(RUN_SEED)
    for number in range(num_steps):
        clear_gradients(model, batch)
        with context():
            output = call(model, batch)
            value = scalar_loss(output, loss)
        value.backward()
        trace.update(look(f"step {number}", model, batch, output=output, loss=value))
        if update is not None:
            update.step()
    trace.update({f"at the end, {path}": entry for path, entry in leaves("weight", dict(model.state_dict()))})
    return trace


def difference(expected: Any, actual: Any) -> str | None:
    """Say in words how two entries of a trace differ, or return None where they are the same."""
    if not isinstance(expected, SeenTensor) or not isinstance(actual, SeenTensor):
        # repr tells 1 from True and -0.0 from 0.0, which == does not.
        return None if repr(expected) == repr(actual) else f"expected {expected!r}, got {actual!r}"
    if expected.description != actual.description:
        return f"expected {expected.description}, got {actual.description}"
    if torch.equal(expected.bits(), actual.bits()):
        return None
    wide = torch.complex128 if expected.numbers.is_complex() else torch.float64
    error = (expected.numbers.to(wide) - actual.numbers.to(wide)).abs()
    # By bits, as the comparison is: 0.0 and -0.0 differ although their difference is nought.
    bytes_differ = (expected.bits() != actual.bits()).view(error.numel(), -1)
    num_different = int(bytes_differ.any(1).sum())
    largest = f"{error.max():.3g}"
    return f"{num_different} of {error.numel()} numbers differ, by up to {largest} ({expected.description})"


def assert_same(expected: Trace, actual: Trace) -> None:
    """Raise StepsDifferError at the first entry, in the order of the steps, that is not the same."""
    for path, entry in expected.items():
        if path not in actual:
            raise StepsDifferError(f"{path}: missing")
        message = difference(entry, actual[path])
        if message is not None:
            raise StepsDifferError(f"{path}: {message}")
    extra = [path for path in actual if path not in expected]
    if extra:
        raise StepsDifferError(f"{extra[0]}: not there in the plain run")
