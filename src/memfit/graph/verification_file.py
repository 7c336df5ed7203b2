"""Files of verifications: one JSON object. Infinite errors, which JSON has no number for, are the text "infinite"."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from memfit.documents import check_fields, check_kind, read_document, write_text
from memfit.errors import InvalidParameterError, PlanFileError
from memfit.graph.verification import Quartiles, Verification
from memfit.validation import shown, whole_number

VERIFICATION_FORMAT = "memfit-verification"
VERIFICATION_VERSION = 1

_INFINITE = "infinite"
_FIELDS = tuple(field.name for field in fields(Verification))
# Not in files of memfit's first days.
_LATER_FIELDS = frozenset(
    {
        "plain_gradient_distance",
        "host_bytes",
        "num_gradients",
        "gradient_distance",
        "gradient_tolerance",
        "compared_with",
        "not_as_planned",
    }
)
# Written for readers and other tools; read back, they follow from the rest.
_EXTRAS = ("within_budget", "holds")


def verification_document(verification: Verification) -> dict[str, Any]:
    """Return ``verification`` as the JSON object that files and ``--json`` carry."""
    document: dict[str, Any] = {"format": VERIFICATION_FORMAT, "version": VERIFICATION_VERSION}
    document |= {name: _written(getattr(verification, name)) for name in (*_EXTRAS, *_FIELDS)}
    return document


def save_verification(verification: Verification, path: str | os.PathLike[str]) -> None:
    """Write ``verification`` to ``path``, as `load_verification` reads it."""
    write_text(path, json.dumps(verification_document(verification), indent=2, ensure_ascii=False) + "\n")


def load_verification(path: str | os.PathLike[str]) -> Verification:
    """Return the verification in the file at ``path``; what is wrong with it is a ``PlanFileError`` with the place."""
    return verification_from_document(read_document(path), path)


def verification_from_document(document: dict[str, Any], path: str | os.PathLike[str]) -> Verification:
    """Return the verification of a document already read; ``path`` is for messages."""
    check_kind(document, path, expected=VERIFICATION_FORMAT, version=VERIFICATION_VERSION)
    required = frozenset({"format", "version", *_FIELDS}) - _LATER_FIELDS
    check_fields(document, f"{path}", required=required, optional=_LATER_FIELDS.union(_EXTRAS))
    try:
        return Verification(**{name: _READ[name](document[name], name) for name in _FIELDS if name in document})
    except InvalidParameterError as error:
        raise PlanFileError(f"{path}: {error}") from None


def _written(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return _INFINITE if value == math.inf else value


def _or_none(read: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, name: None if value is None else read(value, name)


def _bool(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise InvalidParameterError(f"{name} must be true or false; got {shown(value)}")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidParameterError(f"{name} must be a number; got {shown(value)}")
    return float(value)


def _error(value: Any, name: str) -> float:
    return math.inf if value == _INFINITE else _number(value, name)


def _quartiles(value: Any, name: str) -> Quartiles:
    if not isinstance(value, list) or len(value) != 2:
        raise InvalidParameterError(f"{name} must be a list of two numbers; got {shown(value)}")
    return Quartiles(*(_number(number, name) for number in value))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidParameterError(f"{name} must be a text; got {shown(value)}")
    return value


def _texts(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise InvalidParameterError(f"{name} must be a list of texts; got {shown(value)}")
    return tuple(_text(entry, name) for entry in value)


_READ: dict[str, Callable[[Any, str], Any]] = {
    "gradients_equal": _or_none(_bool),
    "max_gradient_error": _or_none(_error),
    "plain_reproducible": _or_none(_bool),
    "plain_gradient_error": _or_none(_error),
    "differing_parameters": _texts,
    "plain_peak_bytes": _or_none(whole_number),
    "peak_bytes": whole_number,
    "predicted_peak_bytes": whole_number,
    "budget_bytes": _or_none(whole_number),
    "plain_step_seconds": _or_none(_number),
    "step_seconds": _number,
    "overhead": _or_none(_number),
    "plain_step_quartiles_seconds": _or_none(_quartiles),
    "step_quartiles_seconds": _quartiles,
    "overhead_quartiles": _or_none(_quartiles),
    "num_rounds": whole_number,
    "num_gradients": _or_none(whole_number),
    "device": _text,
    "device_name": _text,
    "torch_version": _text,
    "fingerprint": _text,
    "plain_gradient_distance": _or_none(_error),
    "host_bytes": whole_number,
    "gradient_distance": _or_none(_error),
    "gradient_tolerance": _or_none(_number),
    "compared_with": _text,
    "not_as_planned": _or_none(_text),
}
