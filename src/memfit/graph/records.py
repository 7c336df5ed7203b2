"""Reads frozen data classes from JSON objects: fields by their names, each checked by its type.

A type may be ``Annotated`` with its limits: a ``NumberRange`` for floats, and for whole numbers the largest one, or the
name of a limit that is known when a file is read, such as how many ops it has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from functools import partial
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeAlias, Union, get_args, get_origin, get_type_hints

from memfit.documents import check_fields
from memfit.errors import InvalidParameterError, PlanFileError
from memfit.validation import LARGEST_COUNT, shown, whole_number

Reader: TypeAlias = Callable[[Any, str], Any]
"""Returns what an entry of a file means; the text names the entry in errors."""


class NumberRange(NamedTuple):
    """What a number may be, in words and as limits."""

    words: str
    minimum: float
    maximum: float


LARGEST_NUMBER = 1e15
"""The largest of measured numbers: planning adds seconds up in floats."""

Seconds: TypeAlias = Annotated[
    float, NumberRange("a number of seconds, at least 0 and at most 1e+15", 0.0, LARGEST_NUMBER)
]
Count: TypeAlias = Annotated[int, LARGEST_COUNT]
"""Of FLOPs or bytes in all."""

Gap: TypeAlias = Annotated[float, NumberRange("a number, at least 0", 0.0, sys.float_info.max)]
"""How far a plan may be from the best one, as a share."""

_ANY_NUMBER = NumberRange("a number", -sys.float_info.max, sys.float_info.max)


def text(value: Any, name: str) -> str:
    """Return ``value``, which must be a text."""
    if not isinstance(value, str):
        raise InvalidParameterError(f"{name} must be a text; got {shown(value)}")
    return value


def written_fields(kind: Any) -> list[Field[Any]]:
    """Return the fields of a data class that files have: those that make two of its objects equal."""
    return [field for field in fields(kind) if field.compare]


def usual_values(kind: Any) -> dict[str, Any]:
    """Return the default values of a data class by the names of its fields."""
    defaults = {field.name: _default_of(field) for field in fields(kind)}
    return {name: default for name, default in defaults.items() if default is not MISSING}


class Records:
    """Readers of types.

    ``own`` are those of types that are not written as usual, ``limits`` those that types name, and ``checks`` raise
    where the fields of a data class do not fit each other.
    """

    def __init__(
        self,
        own: Mapping[Any, Reader] | None = None,
        limits: Mapping[str, int] | None = None,
        checks: Mapping[Any, Callable[[Any], None]] | None = None,
    ) -> None:
        self.readers: dict[Any, Reader] = {bool: _boolean, int: whole_number, float: partial(_number, _ANY_NUMBER)}
        self.readers |= {str: text, **(own or {})}
        self._limits = limits or {}
        self._checks = checks or {}

    def reader_of(self, kind: Any) -> Reader:
        """Return the reader of a type."""
        if kind not in self.readers:
            self.readers[kind] = self._made(kind)
        return self.readers[kind]

    def record(
        self,
        kind: Any,
        usual: Mapping[str, Any] | None = None,
        required: Iterable[str] = (),
        written_as: Mapping[str, str] | None = None,
    ) -> Reader:
        """Return the reader of a data class.

        An object may leave out fields with a default or a ``usual`` value, unless they are ``required``. ``written_as``
        has the names of fields that are called something else in files.
        """
        values, names = usual or {}, written_as or {}
        hints = get_type_hints(kind, include_extras=True)
        field_of = {names.get(field.name, field.name): field.name for field in written_fields(kind)}
        readers = {name: self.reader_of(hints[field]) for name, field in field_of.items()}
        optional = frozenset(readers).intersection({*usual_values(kind), *values}).difference(required)
        needed = frozenset(readers) - optional
        check = self._checks.get(kind)

        def read(entry: Any, place: str) -> Any:
            given = check_fields(entry, place, required=needed, optional=optional)
            try:
                found = {field_of[name]: readers[name](value, name) for name, value in given.items()}
                made = kind(**{**values, **found})
                if check is not None:
                    check(made)
                return made
            except (InvalidParameterError, PlanFileError) as error:
                raise PlanFileError(f"{place}: {error}") from None

        return read

    def positional(self, kind: Any) -> Reader:
        """Return the reader of a data class that is written as a list of its fields' values."""
        names = [field.name for field in written_fields(kind)]
        read = self.record(kind)

        def read_list(entry: Any, name: str) -> Any:
            if not isinstance(entry, list) or len(entry) != len(names):
                plural = name.partition("[")[0]
                raise InvalidParameterError(f"{plural} must be lists of {', '.join(names)}; got {shown(entry)}")
            return read(dict(zip(names, entry, strict=True)), name)

        return read_list

    def _made(self, kind: Any) -> Reader:
        origin, arguments = get_origin(kind), get_args(kind)
        if is_dataclass(kind):
            return self.record(kind)
        if origin is Annotated:
            base, limit = arguments
            if base is float:
                return partial(_number, limit)
            return partial(whole_number, maximum=self._limits[limit] if isinstance(limit, str) else limit)
        if origin in (Union, UnionType):
            return partial(_or_none, self.reader_of(arguments[0]))
        if origin is tuple:
            return partial(_records if is_dataclass(arguments[0]) else _values, self.reader_of(arguments[0]))
        if origin is Mapping:
            return partial(_mapping, self.reader_of(arguments[1]))
        if issubclass(kind, StrEnum):
            return partial(_member, {str(member): member for member in kind})
        # A named tuple of numbers.
        return partial(_numbers, kind)


def member_by_name(kind: type[StrEnum]) -> Reader:
    """Return the reader of an enumeration that is written by the names of its members."""
    return partial(_member, dict(kind.__members__))


def _default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _or_none(read: Reader, value: Any, name: str) -> Any:
    return None if value is None else read(value, name)


def _values(read: Reader, value: Any, name: str) -> tuple[Any, ...]:
    return tuple(read(entry, name) for entry in _list(value, name))


def _records(read: Reader, value: Any, name: str) -> tuple[Any, ...]:
    return tuple(read(entry, f"{name}[{place}]") for place, entry in enumerate(_list(value, name)))


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidParameterError(f"{name} must be a list; got {shown(value)}")
    return value


def _mapping(read: Reader, value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidParameterError(f"{name} must be an object; got {shown(value)}")
    return {key: read(entry, f"{name}: {key}") for key, entry in value.items()}


def _numbers(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, list) or len(value) != len(kind._fields):
        raise InvalidParameterError(f"{name} must be a list of {len(kind._fields)} numbers; got {shown(value)}")
    return kind(*(_number(_ANY_NUMBER, number, name) for number in value))


def _number(limits: NumberRange, value: Any, name: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not limits.minimum <= value <= limits.maximum:
        raise InvalidParameterError(f"{name} must be {limits.words}; got {shown(value)}")
    return float(value)


def _boolean(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise InvalidParameterError(f"{name} must be true or false; got {shown(value)}")
    return value


def _member(members: Mapping[str, StrEnum], value: Any, name: str) -> StrEnum:
    if not isinstance(value, str) or value not in members:
        raise InvalidParameterError(f"{name} must be one of {', '.join(members)}; got {shown(value)}")
    return members[value]
