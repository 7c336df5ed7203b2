"""The numbers of binomial checkpointing: how few forward calls suffice, and where the snapshots stand.

Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 26(1), 2000. They reverse a chain of l steps with s
snapshots, the initial state being one of the snapshots, and count the steps that are run forward without
being reversed right away ("advances"). With beta(s, r) = binomial(s + r, s) and r the least integer for
which l <= beta(s, r), the least number of advances is r * l - beta(s + 1, r - 1).

===============  =====================================  ======================================================
the paper        here                                   in a sweep over a chain of layers
===============  =====================================  ======================================================
l steps          ``num_steps``                          the layers and the loss: ``num_layers + 1``
s snapshots      ``num_snapshots``                      the slots and the input: ``num_slots + 1``
r repetitions    ``repetitions(l, s)``                  no layer runs more often than this
t(l, s)          ``advances(l, s)``                     ``forward_calls(num_layers, num_slots)``
===============  =====================================  ======================================================

The loss is a step because it stands between the forward and the backward pass: when backward begins, the
activation at hand is the chain's output, not the last layer's input. The input is a snapshot because it is
kept in any case, outside the slots. So the paper's 24 steps and 5 snapshots, 44 advances, are 23 layers
with 4 slots, 44 forward calls.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb

from memfit.validation import whole_number


def forward_calls(num_layers: int, num_slots: int) -> int:
    """The least number of forward calls in which a chain can be run forward and then swept backward.

    The input is held throughout, ``num_slots`` further activations may be held at a time, and reversing a
    layer needs that layer's input and no forward call of its own.
    """
    whole_number(num_layers, "num_layers", maximum=None)
    whole_number(num_slots, "num_slots", maximum=None)
    return advances(num_layers + 1, num_slots + 1)


@lru_cache(maxsize=1 << 16)
def advances(num_steps: int, num_snapshots: int) -> int:
    """The paper's t(l, s): the fewest advances that reverse so many steps with so many snapshots."""
    times = repetitions(num_steps, num_snapshots)
    return times * num_steps - _beta(num_snapshots + 1, times - 1)


def repetitions(num_steps: int, num_snapshots: int) -> int:
    """The paper's r: no step of an optimal sweep is run forward more often than this."""
    if num_snapshots == 1:
        return num_steps - 1
    times, reach = 0, 1
    while reach < num_steps:
        times += 1
        reach = reach * (num_snapshots + times) // times
    return times


def binomial_states(num_layers: int, num_slots: int) -> tuple[int, ...]:
    """Where a forward pass stores so that the whole sweep makes no more than ``forward_calls``.

    State k is the output of the first k layers. Each stride is as near to an even spread as optimality
    lets it be. No state is further than max(beta(num_slots + 1, r - 1) - 1, r) calls from a stored one or the
    input, r being the repetitions: a stride is at most that beta, and the end, which no slot is left for,
    has at most r + 1 states.
    """
    states = []
    state, num_steps, num_snapshots = 0, num_layers + 1, num_slots + 1
    while num_snapshots > 1 and num_steps > 2:
        stride = optimal_stride(num_steps, num_snapshots)
        state, num_steps, num_snapshots = state + stride, num_steps - stride, num_snapshots - 1
        states.append(state)
    return tuple(states)


def even_states(num_layers: int, num_slots: int) -> tuple[int, ...]:
    """Where a forward pass stores so that the longest replay is as short as it can be.

    State k is the output of the first k layers. The slots and the input cut the ``num_layers + 1`` states
    into ``num_slots + 1`` runs, so some run has at least ceil((num_layers + 1) / (num_slots + 1)) states, and
    the last of them is one call less away. Here no run is longer.
    """
    num_stored = min(num_slots, num_layers)
    return tuple(k * (num_layers + 1) // (num_stored + 1) for k in range(1, num_stored + 1))


def optimal_stride(num_steps: int, num_snapshots: int) -> int:
    """How far to advance from the state at hand to the next snapshot, in an optimal reversal.

    The optimal strides are an interval (figure 4 of the paper); the one nearest to an even spread is
    returned. ``num_snapshots`` counts the state at hand, so it is at least 2, as is ``num_steps``.
    """
    times = repetitions(num_steps, num_snapshots)
    shortest = max(_beta(num_snapshots, times - 2), num_steps - _beta(num_snapshots - 1, times), 1)
    longest = min(_beta(num_snapshots, times - 1), num_steps - _beta(num_snapshots - 1, times - 1))
    even = -(-num_steps // num_snapshots)
    return min(max(even, shortest), longest)


def _beta(num_snapshots: int, times: int) -> int:
    """The most steps that so many snapshots can reverse if no step runs forward more than ``times`` times."""
    return comb(num_snapshots + times, num_snapshots) if times >= 0 else 0
