"""The layers of a chain as callers give them: checked, and named in messages."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.errors import InvalidParameterError
from memfit.validation import shown, whole_number


def layer_number(value: object, name: str) -> int:
    """Return a layer's number as an int; ``name`` is what the error calls it."""
    return whole_number(value, name, maximum=None)


def layer_numbers(layers: Iterable[int]) -> tuple[int, ...]:
    """Return the layers of a chain in the order they run: whole numbers, in any order, none of them twice."""
    if isinstance(layers, str | bytes) or not isinstance(layers, Iterable):
        raise InvalidParameterError(
            f"layers must be the numbers of the layers in the order they run; got {shown(layers)}"
        )
    chain = tuple(layer_number(layer, f"layers[{position}]") for position, layer in enumerate(layers))
    seen: set[int] = set()
    for layer in chain:
        if layer in seen:
            raise InvalidParameterError(f"layer {layer} is repeated in layers; a layer may run once in a chain")
        seen.add(layer)
    return chain


def listed(layers: Iterable[int]) -> str:
    """Return the layers for a message, the middle of a long list left out."""
    names = [str(layer) for layer in layers]
    return f"[{', '.join(names if len(names) <= 12 else [*names[:6], '...', *names[-3:]])}]"
