"""A backward sweep over a chain, as data: what to run, what to hold and what to let go, in which order.

State k is the output of the first k layers of the chain, so state 0 is the input and layer k turns state k
into state k + 1. Actions name states; the code that runs them has the arrays. The vocabulary is closed:
``Restore``, ``Forward``, ``Store``, ``Free`` and ``Reverse``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memfit.layers.checkpointing.revolve import advances, optimal_stride


@dataclass(frozen=True, slots=True)
class Restore:
    """Make a copy of a held state the working activation. The input, state 0, is always held."""

    state: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the layers from the working activation, state ``start``, to state ``stop``."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Store:
    """Put a copy of the working activation, which is this state, into a free slot."""

    state: int


@dataclass(frozen=True, slots=True)
class Free:
    """Give up a stored state, whose slot is free from then on."""

    state: int


@dataclass(frozen=True, slots=True)
class Reverse:
    """Apply this layer's vector-Jacobian product at the working activation, which is the layer's input."""

    layer: int


Action = Restore | Forward | Store | Free | Reverse


def backward_sweep(num_layers: int, num_slots: int, stored: Sequence[int]) -> Iterator[Action]:
    """Reverse every layer, last to first, from the states that a forward pass stored.

    ``stored`` is ascending, within 1 … num_layers, and not longer than ``num_slots``. Empty
    slots, and those the sweep empties, take states inside the segment at hand, so a segment that fits the
    empty slots is replayed once. From ``binomial_states``, no sweep makes fewer forward calls.
    """
    # The chain's output is no layer's input, so a stored one only takes up a slot.
    useful = [state for state in stored if state < num_layers]
    kept = _states_worth_keeping(useful, num_layers, num_slots)
    for state in sorted(set(stored).difference(kept)):
        yield Free(state)
    held = [0, *kept]
    for layer in range(num_layers - 1, -1, -1):
        state = held[-1]
        yield Restore(state)
        if state == layer and state > 0:
            yield Free(held.pop())
        while state < layer:
            num_free = num_slots - (len(held) - 1)
            stop = layer if num_free == 0 else state + optimal_stride(layer + 1 - state, num_free + 1)
            yield Forward(state, stop)
            state = stop
            if state < layer:
                yield Store(state)
                held.append(state)
        yield Reverse(layer)


def _states_worth_keeping(stored: Sequence[int], num_layers: int, num_slots: int) -> Sequence[int]:
    """Return the stored states without the lowest ones, as long as giving these up saves forward calls.

    A slot given up helps every segment above its state: one next to the input is worth more empty.
    """

    def num_calls(kept: Sequence[int]) -> int:
        segments = enumerate(pairwise((0, *kept, num_layers)))
        return sum(advances(upper - lower, num_slots + 1 - num_below) for num_below, (lower, upper) in segments)

    while stored and num_calls(stored[1:]) < num_calls(stored):
        stored = stored[1:]
    return stored
