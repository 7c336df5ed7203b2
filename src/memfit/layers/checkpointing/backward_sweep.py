"""A sweep over a chain, as data: what to run, what to hold and what to let go, in which order.

State k is the output of the first k layers of the chain, so state 0 is the input and layer k turns state k
into state k + 1. Actions name states; the code that runs them has the arrays. The
vocabulary is closed: ``Restore``, ``Take``, ``Forward``, ``Store``, ``Free`` and ``Reverse``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memfit.layers.checkpointing.revolve import advances, binomial_states, optimal_stride


@dataclass(frozen=True, slots=True)
class Restore:
    """Make a copy of a held state the working activation. The input, state 0, is always held."""

    state: int

    def __str__(self) -> str:
        return f"R{self.state}"


@dataclass(frozen=True, slots=True)
class Take:
    """Move a stored state out of its slot, which is free from then on, and make it the working activation."""

    state: int

    def __str__(self) -> str:
        return f"T{self.state}"


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the layers from the working activation, state ``start``, to state ``stop``."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"F{self.start}-{self.stop}"


@dataclass(frozen=True, slots=True)
class Store:
    """Put a copy of the working activation, which is this state, into a free slot."""

    state: int

    def __str__(self) -> str:
        return f"S{self.state}"


@dataclass(frozen=True, slots=True)
class Free:
    """Give up a stored state that the sweep does better without."""

    state: int

    def __str__(self) -> str:
        return f"D{self.state}"


@dataclass(frozen=True, slots=True)
class Reverse:
    """Apply this layer's vector-Jacobian product at the working activation, which is the layer's input."""

    layer: int

    def __str__(self) -> str:
        return f"B{self.layer}"


Action = Restore | Take | Forward | Store | Free | Reverse


def binomial_sweep(num_layers: int, num_slots: int) -> Iterator[Action]:
    """A whole forward and backward sweep, with the minimal number of forward calls, ``revolve.forward_calls``."""
    stored = binomial_states(num_layers, num_slots)
    yield Restore(0)
    state = 0
    for stop in stored:
        yield Forward(state, stop)
        yield Store(stop)
        state = stop
    if state < num_layers:
        yield Forward(state, num_layers)
    yield from backward_sweep(num_layers, num_slots, stored)


def backward_sweep(num_layers: int, num_slots: int, stored: Sequence[int]) -> Iterator[Action]:
    """Reverse every layer, last to first, from the states that a forward pass stored.

    ``stored`` is ascending, within 1 … num_layers, and not longer than ``num_slots``. Empty
    slots, and those the sweep empties, take states inside the segment at hand, so a segment that fits the
    empty slots is replayed once. No sweep that settles at its start which stored states to keep makes fewer
    forward calls; from ``binomial_states``, none at all does.
    """
    # The chain's output is no layer's input, so a stored one only takes up a slot.
    useful = [state for state in stored if state < num_layers]
    kept = states_worth_keeping(useful, num_layers, num_slots)
    for state in sorted(set(stored).difference(kept)):
        yield Free(state)
    held = [0, *kept]
    for layer in range(num_layers - 1, -1, -1):
        state = held[-1]
        if state == layer and state > 0:
            yield Take(held.pop())
        else:
            yield Restore(state)
        while state < layer:
            num_free = num_slots - (len(held) - 1)
            stop = layer if num_free == 0 else state + optimal_stride(layer + 1 - state, num_free + 1)
            yield Forward(state, stop)
            state = stop
            if state < layer:
                yield Store(state)
                held.append(state)
        yield Reverse(layer)


def states_worth_keeping(stored: Sequence[int], num_layers: int, num_slots: int) -> tuple[int, ...]:
    """The stored states that a backward sweep keeps to need the fewest forward calls; the others give up
    their slots.

    A slot given up helps every segment above it and costs the segments it parted, so a state can be worth
    more as an empty slot. ``stored`` is ascending, within 1 … num_layers - 1, and not longer than
    ``num_slots``. The choice is exact: a shortest path over (kept state, number given up below it), which
    ends when giving up more cannot pay.
    """
    if not stored:
        return ()
    bounds = (0, *stored, num_layers)
    last = len(bounds) - 1
    calls: dict[tuple[int, int], int] = {(0, 0): 0}
    kept_before: dict[tuple[int, int], int] = {}
    best_given_up = 0
    for given_up in range(last):
        # Each state that is not held is computed at least once, so with so few kept nothing is below this:
        fewest_calls = num_layers - last + given_up
        if given_up > 0 and calls[last, best_given_up] <= fewest_calls:
            break
        for upper in range(given_up + 1, last + 1):
            num_snapshots = num_slots + 1 - (upper - 1 - given_up)
            calls[upper, given_up], kept_before[upper, given_up] = min(
                (calls[lower, before] + advances(bounds[upper] - bounds[lower], num_snapshots), lower)
                for lower, before in zip(range(upper - 1, -1, -1), range(given_up, -1, -1), strict=False)
                if (lower, before) in calls
            )
        if calls[last, given_up] < calls[last, best_given_up]:
            best_given_up = given_up
    kept = []
    upper, given_up = last, best_given_up
    while (lower := kept_before[upper, given_up]) > 0:
        kept.append(bounds[lower])
        upper, given_up = lower, given_up - (upper - 1 - lower)
    return tuple(reversed(kept))
