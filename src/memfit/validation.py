"""Checks of numbers and functions from outside: what was given, what is allowed. Nothing here knows of layers."""

from __future__ import annotations

import math
import operator
from fractions import Fraction
from numbers import Rational
from typing import SupportsFloat

from memfit.errors import InvalidParameterError

LARGEST_COUNT = 10**30
"""The largest number of FLOPs or bytes in a file: sums of such still are floats."""

# The widest unsigned integer that other tools write. It keeps every mean and ratio inside a float's range.
LARGEST_WHOLE_NUMBER = 2**64 - 1
# By name, as NumPy need not be there; up to version 1 it is bool_.
_NUMPY_BOOLEANS = (("numpy", "bool"), ("numpy", "bool_"))


def whole_number(value: object, name: str, *, minimum: int = 0, maximum: int | None = LARGEST_WHOLE_NUMBER) -> int:
    """Return ``value`` as an int within the limits (the default upper limit is 2**64 - 1).

    Integers of NumPy will do; bools and floats will not.
    """
    try:
        if is_boolean(value):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # the TypeError is the check
    except Exception:
        raise InvalidParameterError(f"{name} must be a whole number, at least {minimum}; got {shown(value)}") from None
    if number < minimum:
        raise InvalidParameterError(f"{name} must be a whole number, at least {minimum}; got {shown(number)}")
    if maximum is not None and number > maximum:
        raise InvalidParameterError(f"{name} must be a whole number, at most {maximum}; got {shown(number)}")
    return number


def check_sizes(**sizes: object) -> None:
    """Raise unless every size is a whole number, at least 1."""
    for name, size in sizes.items():
        whole_number(size, name, minimum=1)


def check_divides(part: int, part_name: str, whole: int, whole_name: str) -> None:
    """Raise unless ``part`` divides ``whole``."""
    if whole % part:
        raise InvalidParameterError(
            f"{part_name} must divide {whole_name}; got {part_name}={part}, {whole_name}={whole}"
        )


def real_number(value: object, name: str, allowed: str) -> Fraction | float:
    """Return ``value`` as an exact Fraction, or as a float where it is infinite.

    ``allowed`` says in the error what the caller allows.
    """
    if is_boolean(value) or not isinstance(value, (SupportsFloat, Rational)) or _is_array(value):
        raise InvalidParameterError(f"{name} must be {allowed}; got {shown(value)}")
    if isinstance(value, Rational):
        return Fraction(int(value.numerator), int(value.denominator))
    try:
        number = float(value)
    except Exception:
        raise InvalidParameterError(f"{name} must be {allowed}; got {shown(value)}") from None
    if math.isnan(number):
        raise InvalidParameterError(f"{name} must be {allowed}; got NaN")
    return number if math.isinf(number) else Fraction(number)


def refuse_no_function(value: object, name: str, call: str) -> None:
    """Raise unless ``value`` can be called; ``call`` shows in the error how it will be."""
    if not callable(value):
        raise InvalidParameterError(f"{name} must be a function, called as {call}; got {shown(value)}")


def is_boolean(value: object) -> bool:
    """Return whether ``value`` is a truth value, of Python or NumPy, which counts as a number to them.

    True layers or False bytes are always a mistake.
    """
    return isinstance(value, bool) or (type(value).__module__, type(value).__name__) in _NUMPY_BOOLEANS


def shown(value: object) -> str:
    """Return a short repr with the type, for an error message; a repr that fails or is long does no harm."""
    try:
        text = repr(value)
    except Exception:
        text = "a value whose repr fails"
    if len(text) > 60 and _is_array(value):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"  # type: ignore[attr-defined]
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{text} ({type(value).__name__})"


def _is_array(value: object) -> bool:
    # One-element arrays convert to float with a warning; NumPy's scalars have a shape too, but an empty one.
    shape = getattr(value, "shape", ())
    return isinstance(shape, tuple) and shape != ()
