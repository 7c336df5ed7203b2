"""Seconds of the two passes of a step: what they take, or by how much they become longer."""

from __future__ import annotations

from typing import NamedTuple


class Seconds(NamedTuple):
    """Seconds in the forward pass, and in the rest of the step."""

    forward: float
    backward: float


NONE = Seconds(0.0, 0.0)
