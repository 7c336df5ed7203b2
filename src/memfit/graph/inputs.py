"""The tensors that a model is called with, as data: what a profile was measured on and a plan is for. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from memfit.errors import InvalidParameterError
from memfit.validation import shown

_MOST_NAMED = 3


class Input(NamedTuple):
    """One tensor: the argument that it is, or its path inside one (``batch.images.0``), its type and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def difference_in_words(planned: Sequence[Input], given: Sequence[Input]) -> str | None:
    """Return how the ``given`` inputs differ from those ``planned`` for, or None where they are the same."""
    expected, got = ({entry.name: str(entry) for entry in inputs} for inputs in (planned, given))
    names = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
    if not names:
        return None
    named = [f"{name} {expected.get(name, 'absent')}, got {got.get(name, 'none')}" for name in names[:_MOST_NAMED]]
    more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"planned for {'; for '.join(named)}{more}"


def growth_in_words(planned: Sequence[Input], given: Sequence[Input]) -> str | None:
    """Return which of the ``given`` inputs are larger than ``planned``, or None where none is."""
    larger = larger_inputs(planned, given)
    names = {entry.name for entry in larger}
    return difference_in_words([entry for entry in planned if entry.name in names], larger) if larger else None


def larger_inputs(planned: Sequence[Input], given: Sequence[Input]) -> list[Input]:
    """Return those of the ``given`` inputs that are larger in some dimension than what was ``planned`` for.

    So is one that was not planned for. Numbers, which have no dimensions, never are.
    """
    known = {entry.name: entry for entry in planned}
    return [entry for entry in given if entry.shape and not _is_within(entry, known.get(entry.name))]


def largest_inputs(one: Sequence[Input], other: Sequence[Input]) -> tuple[Input, ...]:
    """Return the inputs of both, with the largest size in each dimension."""
    largest = {entry.name: entry for entry in one}
    for entry in other:
        known = largest.get(entry.name)
        if known is None or _is_larger_kind(entry, known):
            largest[entry.name] = entry
        elif len(known.shape) == len(entry.shape):
            largest[entry.name] = known._replace(shape=tuple(map(max, known.shape, entry.shape)))
    return tuple(largest.values())


def _is_within(entry: Input, planned: Input | None) -> bool:
    if planned is None or _is_larger_kind(entry, planned):
        return False
    # Of other numbers of dimensions, the number of elements was compared already.
    return len(entry.shape) != len(planned.shape) or all(map(int.__le__, entry.shape, planned.shape))


def _is_larger_kind(entry: Input, other: Input) -> bool:
    """Return whether ``entry`` has wider elements than ``other``, or other dimensions and more elements."""
    if _num_bits(entry.dtype) > _num_bits(other.dtype):
        return True
    return len(entry.shape) != len(other.shape) and prod(entry.shape) > prod(other.shape)


def _num_bits(dtype: str) -> int:
    """Return the bits of an element, as the type's name has them: ``bfloat16``, ``int64``, ``float8_e4m3fn``."""
    number = re.search(r"\d+", dtype)
    return int(number.group()) if number is not None else 8


def inputs_document(inputs: Sequence[Input]) -> dict[str, str]:
    """Return ``inputs`` as files carry them: each name with type and shape, such as ``"int64[8, 128]"``."""
    return {entry.name: str(entry) for entry in inputs}


def inputs_from_document(document: Any, name: str) -> tuple[Input, ...]:
    """Return the inputs of a file; what is wrong with them is an ``InvalidParameterError``."""
    if not isinstance(document, dict):
        raise InvalidParameterError(f"{name} must be an object of names with types and shapes; got {shown(document)}")
    return tuple(_input(name, text) for name, text in document.items())


def _input(name: str, text: Any) -> Input:
    parts = re.fullmatch(r"(\w+)\[((?:\d{1,18}(?:, \d{1,18})*)?)\]", text) if isinstance(text, str) else None
    if parts is None:
        raise InvalidParameterError(
            f'inputs must have a type and a shape each, such as "int64[8, 128]"; got {shown(text)} for {name!r}'
        )
    return Input(name, parts[1], tuple(int(size) for size in parts[2].split(", ") if size))
