"""Strategies as people write them on a command line: ``every-nth:2``, ``selective:0.5``, ``full``."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from memfit.errors import InvalidParameterError
from memfit.layers.strategies import (
    AttentionOnly,
    EveryNthLayer,
    FfnOnly,
    Full,
    LargestLayers,
    LayerStrategy,
    NoCheckpointing,
    Selective,
    SqrtLayers,
)

_PLAIN: dict[str, Callable[[], LayerStrategy]] = {
    "none": NoCheckpointing,
    "full": Full,
    "attention": AttentionOnly,
    "ffn": FfnOnly,
    "sqrt": SqrtLayers,
}
_WITH_NUMBER: dict[str, Callable[[str], LayerStrategy]] = {
    "every-nth": lambda text: EveryNthLayer(int(text)),
    "largest": lambda text: LargestLayers(int(text)),
    "selective": lambda text: Selective(float(Fraction(text))),
}
WRITTEN_STRATEGIES = (*_PLAIN, "every-nth:N", "largest:K", "selective:RATIO")
"""All forms of a strategy, for help texts and errors."""


def parse_strategy(text: str) -> LayerStrategy:
    """Return the strategy that ``text`` names; its number is checked when it plans."""
    name, colon, number = text.strip().lower().partition(":")
    if name in _PLAIN and not colon:
        return _PLAIN[name]()
    if name in _WITH_NUMBER and number:
        try:
            return _WITH_NUMBER[name](number)
        except (ValueError, ZeroDivisionError, OverflowError):
            pass
    raise InvalidParameterError(f"{text!r} is not a strategy; write one of {', '.join(WRITTEN_STRATEGIES)}")
