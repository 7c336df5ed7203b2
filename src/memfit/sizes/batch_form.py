"""Finds the dimensions in which batches differ, and makes a batch of any size from the largest of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memfit.capture.step_arguments import StepArguments
from memfit.errors import InvalidParameterError, MemfitError
from memfit.runtime.applying.batch_tensors import named_tensors
from memfit.validation import shown


class _Dimension(NamedTuple):
    """A dimension of one of a batch's tensors that varies, with its least and its largest size."""

    tensor: int
    dim: int
    least: int
    most: int


class BatchForm:
    """What several batches have in common, and the dimensions in which they differ.

    The *size* of a batch is the length of the dimension that varies most; the others that vary go along with it.
    ``sizes`` are those of the given batches, ascending, and ``arguments`` the step arguments with each of them.
    """

    def __init__(self, arguments: StepArguments, batches: object) -> None:
        given = _given(arguments, batches)
        tensors = [named_tensors((each.batch, each.targets)) for each in given]
        _refuse_other_forms(given, tensors)
        self._dimensions = _varying(tensors)
        if not self._dimensions:
            raise InvalidParameterError(
                "batches must differ in at least one size, such as the length of their sequences; these all have the "
                "same shapes. Give one of them as batch instead"
            )
        self._main = max(self._dimensions, key=lambda each: each.most - each.least)
        sizes = [each[self._main.tensor][1].shape[self._main.dim] for each in tensors]
        order = sorted(range(len(given)), key=lambda place: (sizes[place], _num_elements(tensors[place])))
        self.sizes = tuple(sizes[place] for place in order)
        self.arguments = tuple(given[place] for place in order)
        self._largest = tensors[order[-1]]
        short = [each for each in self._dimensions if self._largest[each.tensor][1].shape[each.dim] < each.most]
        if short:
            raise InvalidParameterError(
                "one of the batches must be the largest in every size that varies, because the plan is for that one; "
                f"the longest has {self._largest[short[0].tensor][0] or 'a tensor'} of shape "
                f"{tuple(self._largest[short[0].tensor][1].shape)}, and another has {short[0].most} in dimension "
                f"{short[0].dim}"
            )
        self.multiple = math.gcd(*self.sizes)

    def at(self, size: int) -> StepArguments:
        """Return the step arguments with a batch of that size.

        Up to the largest size its tensors are parts of the largest batch; beyond it they are zeros, for fake steps.
        """
        if size in self.sizes:
            return self.arguments[self.sizes.index(size)]
        memo: dict[int, Any] = {}
        for place, (_, tensor) in enumerate(self._largest):
            shape = list(tensor.shape)
            for dimension in self._dimensions:
                if dimension.tensor == place:
                    shape[dimension.dim] = self._length_of(dimension, size)
            if shape != list(tensor.shape):
                memo[id(tensor)] = _of_shape(tensor, shape)
            else:
                memo[id(tensor)] = tensor
        largest = self.arguments[-1]
        try:
            batch, targets = copy.deepcopy((largest.batch, largest.targets), memo)
        except Exception as error:
            raise MemfitError(
                f"the batch cannot be copied, which making one of another size needs ({type(error).__name__}: {error})"
            ) from error
        return replace(largest, batch=batch, targets=targets)

    def _length_of(self, dimension: _Dimension, size: int) -> int:
        share = (size - self._main.least) / (self._main.most - self._main.least)
        return max(1, math.ceil(dimension.least + share * (dimension.most - dimension.least) - 1e-9))


def _of_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    known = tensor.detach()
    if all(size <= most for size, most in zip(shape, tensor.shape, strict=True)):
        made = known[tuple(slice(size) for size in shape)].clone(memory_format=torch.contiguous_format)
    else:
        made = known.new_zeros(shape)
    return made.requires_grad_(tensor.requires_grad)


def _given(arguments: StepArguments, batches: object) -> list[StepArguments]:
    if not isinstance(batches, (list, tuple)) or len(batches) < 2:
        raise InvalidParameterError(
            "batches must be a list of at least two batches of different sizes, such as [short, long]; got "
            f"{shown(batches) if not isinstance(batches, (list, tuple)) else f'{len(batches)} of them'}"
        )
    targets = arguments.targets
    if targets is None:
        return [replace(arguments, batch=batch) for batch in batches]
    if not isinstance(targets, (list, tuple)) or len(targets) != len(batches):
        raise InvalidParameterError(
            f"with batches=, targets must be a list with one entry for each of the {len(batches)} batches; got "
            f"{shown(targets)}"
        )
    return [replace(arguments, batch=batch, targets=each) for batch, each in zip(batches, targets, strict=True)]


def _refuse_other_forms(given: Sequence[StepArguments], tensors: Sequence[list[tuple[str, Tensor]]]) -> None:
    first = tensors[0]
    if not first:
        raise InvalidParameterError(f"batches must contain tensors; got {shown(given[0].batch)}")
    for others in tensors[1:]:
        names, other_names = [name for name, _ in first], [name for name, _ in others]
        if names != other_names:
            unmatched = sorted(set(names) ^ set(other_names)) or names
            raise InvalidParameterError(
                f"batches must have the same tensors; {_in_words(unmatched[0])} is in some of them only (they have "
                f"{len(names)} and {len(other_names)} tensors)"
            )
        for (name, tensor), (_, other) in zip(first, others, strict=True):
            if (tensor.dtype, tensor.dim(), tensor.device) != (other.dtype, other.dim(), other.device):
                raise InvalidParameterError(
                    "batches must differ in nothing but sizes, and the types, devices and numbers of dimensions of "
                    f"{_in_words(name)} differ: {_form(tensor)} and {_form(other)}"
                )
    numbers = dict(_numbers_in(given[0].batch, ""))
    for each in given[1:]:
        for name, number in _numbers_in(each.batch, ""):
            if numbers.get(name, number) != number:
                raise InvalidParameterError(
                    "batches must differ in nothing but the sizes of their tensors, and the number at "
                    f"{_in_words(name)} is {numbers[name]} in one and {number} in another: memfit cannot tell what it "
                    "is for other sizes"
                )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _in_words(name: str) -> str:
    # The first part says whether it is in the batch or the targets.
    part, _, rest = name.partition(".")
    return f"{'targets' if part == '1' else 'batch'}{f' {rest!r}' if rest else ''}"


def _numbers_in(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield f"0.{name}", value
    entries = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, (list, tuple)):
        entries = enumerate(value)  # type: ignore[assignment]
    for key, entry in entries:
        yield from _numbers_in(entry, f"{name}.{key}" if name else str(key))


def _varying(tensors: Sequence[list[tuple[str, Tensor]]]) -> list[_Dimension]:
    found = []
    for place, (_, tensor) in enumerate(tensors[0]):
        for dim in range(tensor.dim()):
            lengths = {each[place][1].shape[dim] for each in tensors}
            if len(lengths) > 1:
                found.append(_Dimension(place, dim, min(lengths), max(lengths)))
    return found


def _num_elements(tensors: list[tuple[str, Tensor]]) -> int:
    return sum(tensor.numel() for _, tensor in tensors)
