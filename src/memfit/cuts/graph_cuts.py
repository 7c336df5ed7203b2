"""Which values of a compiled block to save: minimum cuts of its forward graph at rising prices per byte.

Every value that the backward pass needs is either saved, at a price per byte, or recomputed, which costs its op and
needs the op's inputs in turn. For one price the cheapest choice is a minimum cut (project selection)::

    source ── ∞ ──▶ needed(value)            where backward reads the value
    needed(value) ── bytes × price ──▶ recomputed(value) ── cost of the op ──▶ sink
    recomputed(value) ── ∞ ──▶ needed(value), and needed(input) of each input of its op

A value on the source's side of "needed" and on the sink's side of "recomputed" is saved. Rising prices give the lower
convex hull of cost against bytes. Mixing two partitions over the blocks of a model gives the points between them, so
that a menu needs only a few points of the hull.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from memfit.cuts.minimum_cut import hull, maximum_flow_from

# SciPy's flows are whole numbers of 32 bits. All costs and prices together are at most this many units.
_TOTAL_UNITS = 2**28
# More than all units. A flow against an edge adds to what the edge may carry, and the sum must not overflow either.
_INFINITE = 2**30
# Hulls of blocks have a few dozen points; a menu needs their shape only.
_MOST_CUTS = 16


@dataclass(frozen=True, slots=True)
class GraphValue:
    """A value of a block's forward graph.

    ``inputs`` are the places of the values that its op reads. ``cost`` is that of running the op again, in any unit.
    ``num_bytes`` is what saving it takes: 0 for parameters, which are there anyway.
    """

    name: str
    inputs: tuple[int, ...]
    num_bytes: int
    cost: float
    may_be_saved: bool
    may_be_recomputed: bool
    is_read_by_backward: bool


@dataclass(frozen=True, slots=True)
class GraphCut:
    """The cheapest choice at a price: the places of the values that are saved and that are recomputed."""

    price: float
    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    saved_bytes: int
    cost: float


class ForwardGraph:
    """The values of a block's forward graph, each after its inputs."""

    def __init__(self, values: Sequence[GraphValue]) -> None:
        self.values = tuple(values)
        self._needed = self._needed_values()

    def cut(self, price: float) -> GraphCut:
        """Return the cheapest choice at ``price`` per byte; an infinite price minimizes the bytes."""
        needed_node = {place: 2 + 2 * number for number, place in enumerate(self._needed)}
        total_cost = sum(self.values[place].cost for place in self._needed)
        if math.isinf(price):
            smallest_bytes = min(
                (self.values[p].num_bytes for p in self._needed if self.values[p].num_bytes), default=1
            )
            price = 2 * max(total_cost, 1e-12) / smallest_bytes
        total = total_cost + price * sum(self.values[place].num_bytes for place in self._needed)
        units = _TOTAL_UNITS / total if total > 0 else 1.0
        edges: list[tuple[int, int, int]] = []
        for place, node in needed_node.items():
            value = self.values[place]
            # An op that costs something never becomes free by rounding.
            cost = max(1, round(value.cost * units)) if value.cost else 0
            edges.append((node, node + 1, round(price * value.num_bytes * units) if value.may_be_saved else _INFINITE))
            edges.append((node + 1, 1, cost if value.may_be_recomputed else _INFINITE))
            edges.append((node + 1, node, _INFINITE))
            if value.may_be_recomputed:
                edges.extend((node + 1, needed_node[read], _INFINITE) for read in dict.fromkeys(value.inputs))
            if value.is_read_by_backward:
                edges.append((0, node, _INFINITE))
        starts, ends, capacities = np.array(edges, dtype=np.int32).reshape(-1, 3).T
        shape = (2 + 2 * len(needed_node),) * 2
        is_reached = maximum_flow_from(csr_array((capacities, (starts, ends)), shape=shape))[1].tolist()
        saved = [place for place, node in needed_node.items() if is_reached[node] and not is_reached[node + 1]]
        recomputed = [place for place, node in needed_node.items() if is_reached[node + 1]]
        return self._choice(price, saved, recomputed)

    def saving(self, names: Collection[str]) -> GraphCut | None:
        """Return the choice that saves the values called ``names``, and whatever else cannot be recomputed.

        None where a name is unknown.
        """
        if not set(names) <= {value.name for value in self.values}:
            return None
        saved: set[int] = set()
        recomputed: set[int] = set()
        stack = [place for place, value in enumerate(self.values) if value.is_read_by_backward]
        while stack:
            place = stack.pop()
            value = self.values[place]
            if place in saved or place in recomputed:
                continue
            if value.may_be_saved and (value.name in names or not value.may_be_recomputed):
                saved.add(place)
            elif value.may_be_recomputed:
                recomputed.add(place)
                stack.extend(value.inputs)
            else:
                return None
        return self._choice(0.0, sorted(saved), sorted(recomputed))

    def _choice(self, price: float, saved: Sequence[int], recomputed: Sequence[int]) -> GraphCut:
        saved_bytes = sum(self.values[place].num_bytes for place in saved)
        cost = sum(self.values[place].cost for place in recomputed)
        return GraphCut(price, tuple(saved), tuple(recomputed), saved_bytes, cost)

    def names_of(self, places: Iterable[int]) -> tuple[str, ...]:
        """Return the names of the values at ``places``, sorted."""
        return tuple(sorted(self.values[place].name for place in places))

    def hull(self) -> list[GraphCut]:
        """Return choices on the lower convex hull of cost against bytes, the most bytes first."""
        cuts = [
            cut for _, cut in hull(self.cut, lambda cut: cut.cost, lambda cut: cut.saved_bytes, math.inf, _MOST_CUTS)
        ]
        # Of equal bytes, the one that was found first.
        found = {cut.saved_bytes: cut for cut in reversed(cuts)}
        return [found[saved_bytes] for saved_bytes in sorted(found, reverse=True)]

    def _needed_values(self) -> list[int]:
        """Return the places of what backward reads and of what that is made from, in order."""
        needed = {place for place, value in enumerate(self.values) if value.is_read_by_backward}
        for place in reversed(range(len(self.values))):
            if place in needed and self.values[place].may_be_recomputed:
                needed.update(self.values[place].inputs)
        return sorted(needed)


def chosen_cuts(hull: Sequence[GraphCut], num_cuts: int) -> list[GraphCut]:
    """Return at most ``num_cuts`` of the cuts of a ``hull``: those whose mixtures are closest to it."""
    chosen = [0, len(hull) - 1] if len(hull) > 1 else [0]
    while len(chosen) < min(num_cuts, len(hull)):
        costs, sizes = [hull[place].cost for place in chosen], [hull[place].saved_bytes for place in chosen]
        others = [place for place in range(len(hull)) if place not in chosen]
        # Bytes fall along the hull, and `np.interp` wants them to rise.
        mixed = np.interp([hull[place].saved_bytes for place in others], sizes[::-1], costs[::-1])
        errors = mixed - [hull[place].cost for place in others]
        chosen = sorted([*chosen, others[int(np.argmax(errors))]])
    return [hull[place] for place in chosen]
