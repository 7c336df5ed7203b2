"""What several batches have in common, and the sizes in which they differ: makes a batch of any size."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memfit.capture.step_arguments import StepArguments
from memfit.errors import InvalidParameterError, MemfitError
from memfit.graph.inputs import Input
from memfit.runtime.applying.batch_tensors import named_tensors
from memfit.runtime.applying.model_inputs import dtype_name
from memfit.sizes.checked_batches import checked_batches

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of all tensors of a batch and its targets."""

Sizes = tuple[int, ...]
"""A length for each axis of a form."""


class _Dimension(NamedTuple):
    """A dimension of one of a batch's tensors, with its least and its largest length."""

    tensor: int
    dim: int
    least: int
    most: int


class _Axis(NamedTuple):
    """Dimensions that vary together. The length of the first is the *size*; the others are linear functions of it.

    Where the given batches do not differ, all have the same length.
    """

    dimensions: tuple[_Dimension, ...]
    multiple: int

    @property
    def main(self) -> _Dimension:
        return self.dimensions[0]

    def length_of(self, dimension: _Dimension, size: int) -> int:
        return _on_line(size, self.main, dimension)

    def size_of(self, dimension: _Dimension, length: int) -> int:
        return _on_line(length, dimension, self.main)


def _on_line(length: int, of: _Dimension, to: _Dimension) -> int:
    """Return the length of dimension ``to`` where ``of`` has the given one, rounded up."""
    if of.least == of.most:
        return length
    share = (length - of.least) / (of.most - of.least)
    return max(1, math.ceil(to.least + share * (to.most - to.least) - 1e-9))


class BatchForm:
    """The common form of several batches.

    Dimensions whose lengths differ between the batches by the same amounts are one *axis*, and each axis has a size of
    its own. ``arguments`` are the step arguments with each of the batches, the largest last, ``shapes`` their shapes.
    """

    def __init__(self, arguments: StepArguments, batches: object) -> None:
        given = checked_batches(arguments, batches)
        given.sort(key=lambda each: sum(tensor.numel() for _, tensor in _tensors(each)))
        self.arguments = tuple(given)
        self.shapes: tuple[Shapes, ...] = tuple(shapes_of(each) for each in given)
        self._largest = _tensors(given[-1])
        groups: dict[tuple[int, ...], list[_Dimension]] = {}
        fixed: dict[tuple[int, int], list[_Dimension]] = {}
        for tensor in range(len(self._largest)):
            for dim in range(len(self.shapes[0][tensor])):
                lengths = [shapes[tensor][dim] for shapes in self.shapes]
                dimension = _Dimension(tensor, dim, min(lengths), max(lengths))
                if dimension.least < dimension.most:
                    groups.setdefault(tuple(length - lengths[0] for length in lengths), []).append(dimension)
                else:
                    fixed.setdefault((dim, lengths[0]), []).append(dimension)
        if not groups:
            raise InvalidParameterError(
                "batches must differ in at least one size, such as the length of their sequences; these all have the "
                "same shapes. Give one of them as batch instead"
            )
        self._refuse_without_largest([each for group in groups.values() for each in group])
        self._axes = [self._axis(group) for group in groups.values()]
        self._fixed = [self._axis(group) for group in fixed.values()]

    def _axis(self, dimensions: Sequence[_Dimension]) -> _Axis:
        ordered = sorted(dimensions, key=lambda each: each.least - each.most)
        lengths = [shapes[ordered[0].tensor][ordered[0].dim] for shapes in self.shapes]
        return _Axis(tuple(ordered), math.gcd(*lengths) if len({*lengths}) > 1 else 1)

    def _refuse_without_largest(self, dimensions: Sequence[_Dimension]) -> None:
        short = [each for each in dimensions if self.shapes[-1][each.tensor][each.dim] < each.most]
        if short:
            raise InvalidParameterError(
                "one of the batches must be the largest in every size that varies, because the plan is for that one; "
                f"the longest has {self._largest[short[0].tensor][0] or 'a tensor'} of shape "
                f"{self.shapes[-1][short[0].tensor]}, and another has {short[0].most} in dimension {short[0].dim}"
            )

    @property
    def least_sizes(self) -> Sizes:
        """The smallest size of the batches along each axis."""
        return tuple(axis.main.least for axis in self._axes)

    @property
    def most_sizes(self) -> Sizes:
        """The largest size of the batches along each axis."""
        return tuple(axis.main.most for axis in self._axes)

    @property
    def multiples(self) -> Sizes:
        """What the sizes of all batches are multiples of."""
        return tuple(axis.multiple for axis in self._axes)

    def tie_axes(self) -> None:
        """Let all sizes vary together from now on, because the model takes no others."""
        self._axes = [self._axis([dimension for axis in self._axes for dimension in axis.dimensions])]

    def sizes_of(self, shapes: Shapes) -> Sizes:
        """Return the size along each axis of a batch of these shapes."""
        return tuple(shapes[axis.main.tensor][axis.main.dim] for axis in self._axes)

    def shapes_at(self, sizes: Sizes) -> Shapes:
        """Return the shapes of a batch of these sizes."""
        made = [list(shape) for shape in self.shapes[-1]]
        for axis, size in zip(self._axes, sizes, strict=True):
            for dimension in axis.dimensions:
                made[dimension.tensor][dimension.dim] = axis.length_of(dimension, size)
        return tuple(map(tuple, made))

    def at(self, shapes: Shapes) -> StepArguments:
        """Return the step arguments with a batch of these shapes.

        Its tensors are parts of those of the largest batch, which is repeated where they are larger.
        """
        if shapes in self.shapes:
            return self.arguments[self.shapes.index(shapes)]
        memo: dict[int, Any] = {
            id(tensor): tensor if tuple(tensor.shape) == shape else _of_shape(tensor, shape)
            for (_, tensor), shape in zip(self._largest, shapes, strict=True)
        }
        largest = self.arguments[-1]
        try:
            batch, targets = copy.deepcopy((largest.batch, largest.targets), memo)
        except Exception as error:
            raise MemfitError(
                f"the batch cannot be copied, which making one of another size needs ({type(error).__name__}: {error})"
            ) from error
        return replace(largest, batch=batch, targets=targets)

    def is_within_largest(self, shapes: Shapes) -> bool:
        """Return whether the largest batch is as large in every dimension."""
        return all(
            all(length <= most for length, most in zip(shape, largest, strict=True))
            for shape, largest in zip(shapes, self.shapes[-1], strict=True)
        )

    def shapes_for(
        self, inputs: Sequence[Input], planned: Sequence[Input], *, spare: float = 0.0, fills: bool = False
    ) -> Shapes:
        """Return the shapes of a batch with which the model gets ``inputs``; the largest one gives it ``planned``.

        Sizes beyond the largest are that share larger than needed; with ``fills``, the others are those of the largest.
        Inputs that are not of the batch itself are taken to grow as it does.
        """
        known = self._known_lengths(inputs, planned)
        growth = 1.0 if known else _growth(inputs, planned)
        made = [list(shape) for shape in self.shapes[-1]]
        for axis in (*self._axes, *self._fixed):
            most = axis.main.most
            given = [axis.size_of(each, known[each[:2]]) for each in axis.dimensions if each[:2] in known]
            size = max(given, default=math.ceil(growth * most) if axis.main.least < most else most)
            size = _with_spare(size, most, spare, axis.multiple, fills=fills)
            for each in axis.dimensions:
                length = known.get(each[:2])
                goes_along = length is None or axis.size_of(each, length) == max(given)
                made[each.tensor][each.dim] = (
                    axis.length_of(each, size)
                    if length is None or goes_along
                    else _with_spare(length, each.most, spare, 1, fills=fills)
                )
        return tuple(map(tuple, made))

    def _known_lengths(self, inputs: Sequence[Input], planned: Sequence[Input]) -> dict[tuple[int, int], int]:
        """Return the lengths of the batch's dimensions that ``inputs`` say."""
        # A tensor of the batch is the input with its type and shape; of several such, in order.
        tensors = [(dtype_name(tensor.dtype), tuple(tensor.shape)) for _, tensor in self._largest]
        free = list(enumerate(tensors))
        shapes = {entry.name: entry.shape for entry in inputs}
        known: dict[tuple[int, int], int] = {}
        for entry in planned:
            found = next((each for each in free if each[1] == entry[1:]), None)
            if found is None or entry.name not in shapes:
                continue
            free.remove(found)
            known |= {(found[0], dim): length for dim, length in enumerate(shapes[entry.name])}
        return known

    def in_words(self, shapes: Shapes) -> str:
        """Return the sizes, and what else differs from the largest batch."""
        words = " x ".join(map(str, self.sizes_of(shapes)))
        for axis in self._fixed:
            length = shapes[axis.main.tensor][axis.main.dim]
            if length != axis.main.most:
                words += f" (with {length} in place of {axis.main.most} in dimension {axis.main.dim})"
        return words


def shapes_of(arguments: StepArguments) -> Shapes:
    """Return the shapes of all tensors of a batch and its targets."""
    return tuple(tuple(tensor.shape) for _, tensor in _tensors(arguments))


def _tensors(arguments: StepArguments) -> list[tuple[str, Tensor]]:
    return named_tensors((arguments.batch, arguments.targets))


def _with_spare(length: int, most: int, spare: float, multiple: int, *, fills: bool) -> int:
    if length <= most:
        return most if fills else length
    multiple = math.gcd(length, multiple)
    return math.ceil(length * (1 + spare) / multiple) * multiple if spare else length


def _growth(inputs: Sequence[Input], planned: Sequence[Input]) -> float:
    """Return the largest factor by which a dimension of ``inputs`` is larger than ``planned``; 1 where none is."""
    most = {entry.name: entry.shape for entry in planned}
    pairs = [pair for entry in inputs for pair in zip(entry.shape, most[entry.name], strict=True)]
    return max([1.0, *(length / known for length, known in pairs if known)])


def _of_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    times = [math.ceil(size / most) if most else 1 for size, most in zip(shape, tensor.shape, strict=True)]
    repeated = tensor.detach().repeat(times)[tuple(slice(size) for size in shape)]
    if repeated.shape != shape:
        repeated = tensor.new_zeros(shape)
    return repeated.clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)
