"""What a budget may be: bytes, a text with a unit, a share of the device's memory, or "auto"."""

from __future__ import annotations

import operator
from contextlib import suppress
from numbers import Real
from typing import Literal, SupportsIndex, TypeAlias

from memfit.errors import InvalidParameterError
from memfit.graph.model_profile import ModelProfile
from memfit.layers.validation import is_boolean, shown
from memfit.units import parse_bytes

BudgetLike: TypeAlias = int | float | str

AUTO_SHARE = 0.95
"""How much of the free memory "auto" takes: allocators need some room to move."""


def budget_in_bytes(budget: BudgetLike, profile: ModelProfile) -> int:
    """Return the budget in bytes of the whole step."""
    checked = checked_budget(budget)
    if checked == "auto":
        known = _known(profile.free_bytes, 'budget="auto"', "how much memory is free on", profile)
        return int(known * AUTO_SHARE)
    if isinstance(checked, int):
        return checked
    return int(checked * _known(profile.device_bytes, f"budget={budget!r}", "how much memory there is on", profile))


def checked_budget(budget: object) -> int | float | Literal["auto"]:
    """Return the budget as far as it is known without a profile: bytes, a share of the device's memory, or "auto"."""
    if isinstance(budget, str):
        return "auto" if budget.strip().lower() == "auto" else parse_bytes(budget)
    if isinstance(budget, SupportsIndex) and not is_boolean(budget):
        # Arrays say that they do, and then do not.
        with suppress(TypeError):
            return _checked_bytes(operator.index(budget))
    elif isinstance(budget, Real) and not is_boolean(budget):
        return _checked_share(float(budget))
    raise InvalidParameterError(f"{_ALLOWED}; got {shown(budget)}")


def _checked_bytes(num_bytes: int) -> int:
    if num_bytes < 0:
        raise InvalidParameterError(f"{_ALLOWED}; got {num_bytes}, which is negative")
    return num_bytes


def _checked_share(share: float) -> float:
    if not 0 < share <= 1:
        raise InvalidParameterError(
            f"{_ALLOWED}; got the float {share!r}, and a float is a share of the device's memory, above 0 and at most "
            "1. For bytes give an int or a text"
        )
    return share


def _known(num_bytes: int | None, given: str, unknown: str, profile: ModelProfile) -> int:
    if num_bytes is None:
        raise InvalidParameterError(
            f'{given} needs to know {unknown} {profile.device!r}, and this profile does not say; give bytes, as "20GiB"'
        )
    return num_bytes


_ALLOWED = 'budget is an int of bytes, a text such as "20GiB", a float in (0, 1] of the device\'s memory, or "auto"'
