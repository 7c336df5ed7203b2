"""What a budget may be: bytes, a text with a unit, a share of the device's memory, or "auto"."""

from __future__ import annotations

from typing import TypeAlias

from memfit.errors import InvalidParameterError
from memfit.graph.model_profile import ModelProfile
from memfit.units import parse_bytes

BudgetLike: TypeAlias = int | float | str

AUTO_SHARE = 0.95
"""How much of the free memory "auto" takes: allocators need some room to move."""


def budget_in_bytes(budget: BudgetLike, profile: ModelProfile) -> int:
    """Return the budget in bytes of the whole step."""
    if isinstance(budget, str):
        if budget.strip().lower() == "auto":
            known = _known(profile.free_bytes, 'budget="auto"', "how much memory is free on", profile)
            return int(known * AUTO_SHARE)
        return parse_bytes(budget)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise InvalidParameterError(f"{_ALLOWED}; got {budget!r}")
    if isinstance(budget, int):
        if budget < 0:
            raise InvalidParameterError(f"{_ALLOWED}; got {budget}, which is negative")
        return budget
    if not 0 < budget <= 1:
        raise InvalidParameterError(
            f"{_ALLOWED}; got the float {budget!r}, and a float is a share of the device's memory, above 0 and at most "
            "1. For bytes give an int or a text"
        )
    return int(budget * _known(profile.device_bytes, f"budget={budget!r}", "how much memory there is on", profile))


def _known(num_bytes: int | None, given: str, unknown: str, profile: ModelProfile) -> int:
    if num_bytes is None:
        raise InvalidParameterError(
            f'{given} needs to know {unknown} {profile.device!r}, and this profile does not say; give bytes, as "20GiB"'
        )
    return num_bytes


_ALLOWED = 'budget is an int of bytes, a text such as "20GiB", a float in (0, 1] of the device\'s memory, or "auto"'
