"""Refuses batches that have no common form, each with what differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from memfit.capture.step_arguments import StepArguments
from memfit.errors import InvalidParameterError
from memfit.runtime.applying.batch_tensors import named_tensors
from memfit.runtime.applying.model_inputs import dtype_name
from memfit.runtime.engine.call_arguments import is_strided
from memfit.validation import shown


def checked_batches(arguments: StepArguments, batches: object) -> list[StepArguments]:
    """Return the step arguments with each of the batches, which differ in nothing but the sizes of their tensors."""
    given = _given(arguments, batches)
    _refuse_other_forms(given, [named_tensors((each.batch, each.targets)) for each in given])
    return given


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
    nested = next((name for each in tensors for name, tensor in each if not is_strided(tensor)), None)
    if nested is not None:
        raise InvalidParameterError(
            f"batches= needs tensors with one length in each dimension, and {name_in_words(nested)} is a nested or "
            "sparse tensor: memfit cannot make one of another size. Pad the sequences, or give the largest batch as "
            "batch: its plan holds for smaller ones too"
        )
    for others in tensors[1:]:
        names, other_names = [name for name, _ in first], [name for name, _ in others]
        if names != other_names:
            unmatched = sorted(set(names) ^ set(other_names)) or names
            raise InvalidParameterError(
                f"batches must have the same tensors; {name_in_words(unmatched[0])} is in some of them only (they have "
                f"{len(names)} and {len(other_names)} tensors)"
            )
        for (name, tensor), (_, other) in zip(first, others, strict=True):
            if (tensor.dtype, tensor.dim(), tensor.device) != (other.dtype, other.dim(), other.device):
                raise InvalidParameterError(
                    "batches must differ in nothing but sizes, and the types, devices and numbers of dimensions of "
                    f"{name_in_words(name)} differ: {_form(tensor)} and {_form(other)}"
                )
    numbers = dict(_numbers_in(given[0].batch, ""))
    for each in given[1:]:
        for name, number in _numbers_in(each.batch, ""):
            if numbers.get(name, number) != number:
                raise InvalidParameterError(
                    "batches must differ in nothing but the sizes of their tensors, and the number at "
                    f"{name_in_words(name)} is {numbers[name]} in one and {number} in another: memfit cannot derive "
                    "it for other sizes"
                )


def _form(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)} on {tensor.device}"


def name_in_words(name: str) -> str:
    # The first part says whether it is in the batch or the targets.
    part, _, rest = name.partition(".")
    return f"{'targets' if part == '1' else 'batch'}{f' {rest!r}' if rest else ''}"


def _numbers_in(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield f"0.{name}", value
    if isinstance(value, Mapping):
        entries: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    else:
        # Those of a batch of the user's own class; whatever else has attributes is not looked into.
        entries = vars(value).items() if not name and hasattr(value, "__dict__") else ()
    for key, entry in () if isinstance(value, Tensor) else entries:
        yield from _numbers_in(entry, f"{name}.{key}" if name else str(key))
