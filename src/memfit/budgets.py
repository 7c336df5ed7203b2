"""What budgets may be, of the device's memory and of the host's: bytes, a text with a unit, "auto" and the like."""

from __future__ import annotations

import operator
from contextlib import suppress
from numbers import Real
from typing import Literal, SupportsIndex, TypeAlias

from memfit.errors import InvalidParameterError
from memfit.graph.model_profile import ModelProfile
from memfit.units import parse_bytes, parse_share
from memfit.validation import is_boolean, shown

BudgetLike: TypeAlias = int | float | str
HostBudgetLike: TypeAlias = int | str

AUTO_SHARE = 0.95
"""How much of the free memory "auto" takes: allocators need some room to move."""

AUTO_HOST_SHARE = 0.5
"""How much of the host's free memory "auto" takes: what is pinned is lost to all else, and batches are loaded there."""


def budget_in_bytes(budget: BudgetLike, profile: ModelProfile) -> int:
    """Return the budget in bytes of the whole step."""
    checked = checked_budget(budget)
    if checked == "auto":
        known = _known(profile.free_bytes, 'budget="auto"', "how much memory is free on", profile)
        return int(known * AUTO_SHARE)
    if isinstance(checked, int):
        return checked
    return int(checked * _known(profile.device_bytes, f"budget={budget!r}", "how much memory there is on", profile))


def host_budget_in_bytes(host_budget: HostBudgetLike, profile: ModelProfile) -> int:
    """Return how many bytes of the host's memory offloaded values may take; 0 is none at all."""
    checked = checked_host_budget(host_budget)
    if checked == 0:
        return 0
    link = profile.link
    if link is None:
        raise InvalidParameterError(
            f"host_budget={host_budget!r} needs the speed of the link from {profile.device!r} to the host, which this "
            f"profile does not have: {_why_without_link(profile)}"
        )
    return int(link.host_free_bytes * AUTO_HOST_SHARE) if checked == "auto" else checked


def checked_host_budget(host_budget: object) -> int | Literal["auto"]:
    """Return the budget of host memory as far as it is known without a profile: bytes, or "auto"."""
    checked = _bytes_or_auto(host_budget, _ALLOWED_ON_HOST)
    if checked is None:
        raise InvalidParameterError(f"{_ALLOWED_ON_HOST}; got {shown(host_budget)}")
    if checked == "auto":
        return "auto"
    return parse_bytes(checked) if isinstance(checked, str) else checked


def checked_budget(budget: object) -> int | float | Literal["auto"]:
    """Return the budget as far as it is known without a profile: bytes, a share of the device's memory, or "auto"."""
    checked = _bytes_or_auto(budget, _ALLOWED)
    if checked == "auto":
        return "auto"
    if isinstance(checked, int):
        return checked
    if isinstance(checked, str):
        share = parse_share(checked)
        return parse_bytes(checked) if share is None else share
    if isinstance(budget, Real) and not is_boolean(budget):
        given_share = float(budget)
        if 0 < given_share <= 1:
            return given_share
        raise InvalidParameterError(
            f"{_ALLOWED}; got the float {given_share!r}, and a float is a share of the device's memory, above 0 and at "
            "most 1. For bytes give an int or a text"
        )
    raise InvalidParameterError(f"{_ALLOWED}; got {shown(budget)}")


def _bytes_or_auto(budget: object, allowed: str) -> int | str | None:
    """Return bytes, "auto" or any other text; None for what is neither a whole number nor a text."""
    if isinstance(budget, str):
        return "auto" if budget.strip().lower() == "auto" else budget
    if isinstance(budget, SupportsIndex) and not is_boolean(budget):
        # Arrays have an __index__, which raises.
        with suppress(TypeError):
            num_bytes = operator.index(budget)
            if num_bytes < 0:
                raise InvalidParameterError(f"{allowed}; got {num_bytes}, which is negative")
            return num_bytes
    return None


def _known(num_bytes: int | None, given: str, unknown: str, profile: ModelProfile) -> int:
    if num_bytes is None:
        raise InvalidParameterError(
            f'{given} depends on {unknown} {profile.device!r}, which this profile does not have; give bytes, as "20GiB"'
        )
    return num_bytes


def _why_without_link(profile: ModelProfile) -> str:
    if profile.device.partition(":")[0] == "cpu":
        return "a CPU's memory is the host's, so there is nowhere to offload to; leave host_budget out"
    return (
        "it was made by an older memfit, or where the link could not be measured, or for a CUDA graph; profile again "
        "on the GPU, or leave host_budget out"
    )


_ALLOWED = (
    'budget is an int of bytes, a text such as "20GiB" or "90%", a float in (0, 1] of the device\'s memory, or "auto"'
)
_ALLOWED_ON_HOST = (
    'host_budget is an int of bytes, a text such as "64GiB", or "auto" (half of what was free on the host when the '
    "profile was made); 0 offloads nothing"
)
