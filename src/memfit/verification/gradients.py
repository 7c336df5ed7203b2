"""Gradients of a step, copied to host memory, and how two steps' gradients differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from memfit.capture.phases import before_optimizer_steps
from memfit.capture.state.bits import same_bits
from memfit.capture.training_step import TrainingStep
from memfit.distributed.local_tensors import local_tensor
from memfit.runtime.applying.batch_tensors import tensors_of

# Smaller ones are compared on the host before they would have been copied.
_FEWEST_MOVED = 2**16
# In double precision: both gradients, their difference, and the mask of equal elements.
_BYTES_TO_COMPARE = 64

Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class GradientDifference:
    """The names whose gradients differ in any bit, the largest relative error over all of them, and their distances.

    The distance is of all gradients as one vector, as a share of its length. Gradients that would be zero if numbers
    were exact (a bias before a norm, those of an attention's keys) are nothing but rounding: they may have any relative
    error, and are nothing beside the others. The largest distance is that of a single tensor, as a share of its length,
    or where that is larger, of the length that it would have if all gradients were of about the same size.
    """

    names: tuple[str, ...]
    max_error: float
    distance: float
    largest_distance: float


NO_DIFFERENCE = GradientDifference((), 0.0, 0.0, 0.0)


def gradients_of(step: TrainingStep) -> Gradients:
    """Return copies of the gradients there are now, of parameters and of leaves in the batch, in host memory.

    The device is to hold nothing on behalf of the comparison while other steps are measured on it.
    """
    return {name: _host_copy(leaf.grad) for name, leaf in _leaves_of(step)}


def compared_now(step: TrainingStep, reference: Gradients | None) -> tuple[Gradients, GradientDifference]:
    """Return the gradients there are now; with a ``reference``, how they differ from it: that copies none of them."""
    if reference is None:
        return gradients_of(step), NO_DIFFERENCE
    return {}, difference_between(reference, {name: _dense(leaf.grad) for name, leaf in _leaves_of(step)})


def _leaves_of(step: TrainingStep) -> list[tuple[str, Tensor]]:
    named: list[tuple[str, Tensor]] = [*step.model.named_parameters()]
    named += [(f"batch#{number}", tensor) for number, tensor in enumerate(tensors_of(step.batch))]
    return [(name, leaf) for name, leaf in named if leaf.requires_grad and leaf.is_leaf]


def compared_run(step: TrainingStep, reference: Gradients | None) -> tuple[Gradients, GradientDifference]:
    """Run the step; return its gradients, also those that it consumes itself, or how they differ from ``reference``.

    Optimizers that the step, or a hook, steps may be followed by ``zero_grad()``: what they are given is copied before
    each of their steps, under the name of the parameter and the number of the step.
    """
    name_of = {id(leaf): name for name, leaf in _leaves_of(step)}
    gradients: dict[str, Tensor | None] = {}
    num_steps: Counter[int] = Counter()

    def copy_gradients(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    # Parameters of other modules than the model are identified by their order.
                    name = name_of.setdefault(id(parameter), f"other parameter#{len(name_of)}")
                    num_steps[id(parameter)] += 1
                    number = num_steps[id(parameter)]
                    gradients[name if number == 1 else f"{name} (step {number})"] = _host_copy(parameter.grad)

    with before_optimizer_steps(copy_gradients):
        step.run()
    gradients = {**gradients_of(step), **gradients}
    return (gradients, NO_DIFFERENCE) if reference is None else ({}, difference_between(reference, gradients))


def difference_between(plain: Gradients, other: Gradients) -> GradientDifference:
    """Return how ``other`` differs from ``plain``."""
    # A gradient that only one of them has is None in the other.
    plain = {**dict.fromkeys(other), **plain}
    other = {**dict.fromkeys(plain), **other}
    errors: dict[str, float] = {}
    distances: dict[str, float] = {}
    for name, gradient in plain.items():
        one, another = _together(gradient, other[name])
        if not _same(one, another):
            errors[name], distances[name] = relative_error(one, another), _distance(one, another)
    names = tuple(errors)
    if not names:
        return NO_DIFFERENCE
    lengths = {name: _length(each) for name, each in plain.items() if each is not None}
    length = math.hypot(*lengths.values())
    if not length:
        return GradientDifference(names, max(errors.values()), math.inf, math.inf)
    num_elements = sum(gradient.numel() for gradient in plain.values() if gradient is not None)
    shares = [
        distance / max(lengths.get(name, 0.0), length * math.sqrt(_num_elements(plain[name]) / num_elements))
        for name, distance in distances.items()
        if distance
    ]
    distance = math.hypot(*distances.values()) / length
    return GradientDifference(names, max(errors.values()), distance, max(shares, default=0.0))


def _together(one: Tensor | None, another: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return both gradients on one device: on the GPU where that has room to compare them.

    On the host a billion elements take minutes.
    """
    if one is None or another is None:
        return one, another
    device = _fast_device(one.numel())
    return one.to(device), another.to(device)


def _fast_device(num_elements: int) -> str:
    if num_elements < _FEWEST_MOVED or not torch.cuda.is_available():
        return "cpu"
    return "cuda" if torch.cuda.mem_get_info()[0] > _BYTES_TO_COMPARE * num_elements else "cpu"


def relative_error(plain: Tensor | None, other: Tensor | None) -> float:
    """Return the largest |plain - other| relative to the largest |plain|: infinite where one has numbers and one not.

    Elements that are the same infinity, or NaN in both, count as equal.
    """
    if plain is None and other is None:
        return 0.0
    if plain is None or other is None or plain.shape != other.shape:
        return math.inf
    difference = _differences(plain, other).abs()
    if not difference.numel():
        return 0.0
    if not bool(difference.isfinite().all()):
        return math.inf
    magnitudes = _wide(plain).abs()
    scale = float(magnitudes[magnitudes.isfinite()].max())
    return float(difference.max()) / scale if scale else math.inf


def _distance(plain: Tensor | None, other: Tensor | None) -> float:
    if plain is None or other is None or plain.shape != other.shape:
        return math.inf
    distance = float(torch.linalg.vector_norm(_differences(plain, other)))
    return distance if math.isfinite(distance) else math.inf


def _num_elements(gradient: Tensor | None) -> int:
    return 1 if gradient is None else max(gradient.numel(), 1)


def _length(gradient: Tensor) -> float:
    wide = _wide(gradient.to(_fast_device(gradient.numel())))
    return float(torch.linalg.vector_norm(wide[wide.isfinite()]))


def _differences(plain: Tensor, other: Tensor) -> Tensor:
    """Return the differences of the elements that differ; the same infinity, or NaN in both, is no difference."""
    a, b = _wide(plain), _wide(other)
    agrees = (a == b) | (a.isnan() & b.isnan())
    return (a - b)[~agrees]


def _wide(gradient: Tensor) -> Tensor:
    return gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return same_bits(a, b)


def _host_copy(gradient: Tensor | None) -> Tensor | None:
    dense = _dense(gradient)
    return None if dense is None else dense.to("cpu", copy=True)


def _dense(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    gradient = local_tensor(gradient).detach()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
