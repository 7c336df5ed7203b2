"""Checks of the sizes that model builders are asked for."""

from __future__ import annotations

from memfit.errors import InvalidParameterError
from memfit.validation import whole_number


def check_sizes(**sizes: int) -> None:
    """Raise unless every size is a whole number, at least 1."""
    for name, size in sizes.items():
        whole_number(size, name, minimum=1)


def check_divides(part: int, part_name: str, whole: int, whole_name: str) -> None:
    """Raise unless ``part`` divides ``whole``."""
    if whole % part:
        raise InvalidParameterError(
            f"{part_name} must divide {whole_name}; got {part_name}={part}, {whole_name}={whole}"
        )
