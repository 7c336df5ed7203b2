"""A plan as data: for every value of the step, what to do with it. No torch, and nothing here decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Decision(StrEnum):
    """What to do with a value between the op that made it and the backward pass."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    COMPRESS = "compress"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with every value of a model's forward pass.

    ``decisions`` maps value names (``module.path::aten.op#k``) to decisions, in the order in which the values were
    made. ``regions`` are the modules that the engine must listen to for it. ``fingerprint`` is that of the model it is
    for.
    """

    decisions: Mapping[str, Decision]
    regions: tuple[str, ...]
    recompute_flops: int
    fingerprint: str
