"""The strategies: each chooses the layers of a list to drop and recompute. ``plan`` computes what that costs.

A strategy is plain data and may be built with any arguments; they are checked when it chooses, also when the
list is empty.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from memfit.errors import InvalidParameterError
from memfit.graph.layer_profile import LayerMemoryProfile, LayerTypeHint
from memfit.validation import real_number, shown, whole_number

BYTES_PER_MIB = 2**20


class Choice(NamedTuple):
    """The positions to drop, in any order, and a bound on how far their FLOPs are from the least possible."""

    dropped_positions: Sequence[int]
    optimality_gap: float = 0.0


class LayerStrategy(ABC):
    """What every strategy is. Subclass it to bring your own."""

    @abstractmethod
    def choose(self, profiles: Sequence[LayerMemoryProfile]) -> Choice:
        """Return which of ``profiles`` to drop and recompute, by position."""


@dataclass(frozen=True)
class NoCheckpointing(LayerStrategy):
    """Save every layer: no recompute, all the memory."""

    def choose(self, profiles: Sequence[LayerMemoryProfile]) -> Choice:
        return Choice(())


@dataclass(frozen=True)
class Full(LayerStrategy):
    """Drop every layer: the least memory, all the recompute."""

    def choose(self, profiles: Sequence[LayerMemoryProfile]) -> Choice:
        return Choice(range(len(profiles)))


@dataclass(frozen=True)
class Selective(LayerStrategy):
    """Drop the share ``checkpoint_ratio`` (0 to 1) of the layers, evenly spread.

    Of N layers, k = ratio × N, rounded half away from zero, are dropped: the positions j × N/k for j = 0 …
    k-1, each rounded the way N/k itself rounds (up from a half on). The distances between neighbours differ
    by at most one.
    """

    checkpoint_ratio: float

    def choose(self, profiles: Sequence[LayerMemoryProfile]) -> Choice:
        allowed = "a number from 0 to 1"
        ratio = real_number(self.checkpoint_ratio, "checkpoint_ratio", allowed)
        if not 0 <= ratio <= 1:
            raise InvalidParameterError(
                f"checkpoint_ratio must be {allowed}, the share of layers to drop; got {shown(self.checkpoint_ratio)}"
            )
        num_layers = len(profiles)
        # The product as a float: 0.3 × 5 is meant to be 1.5, and the float 0.3 is a little less than that.
        product = float(ratio) * num_layers
        num_dropped = math.floor(product) + (product - math.floor(product) >= 0.5)
        if num_dropped == 0:
            return Choice(())
        rounds_up = 2 * (num_layers % num_dropped) >= num_dropped
        extra = num_dropped - 1 if rounds_up else 0
        return Choice([(j * num_layers + extra) // num_dropped for j in range(num_dropped)])


@dataclass(frozen=True)
class AttentionOnly(LayerStrategy):
    """Drop the attention layers."""

    def choose(self, profiles: Sequence[LayerMemoryProfile]) -> Choice:
        return _of_type(profiles, LayerTypeHint.ATTENTION)


@dataclass(frozen=True)
class FfnOnly(LayerStrategy):
    """Drop the feed-forward layers."""

    def choose(self, profiles: Sequence[LayerMemoryProfile]) -> Choice:
        return _of_type(profiles, LayerTypeHint.FFN)


@dataclass(frozen=True)
class EveryNthLayer(LayerStrategy):
    """Drop positions 0, n, 2n, … of the list; n is at least 1."""

    n: int

    def choose(self, profiles: Sequence[LayerMemoryProfile]) -> Choice:
        stride = whole_number(self.n, "n of EveryNthLayer", minimum=1)
        return Choice(range(0, len(profiles), stride))


@dataclass(frozen=True)
class LargestLayers(LayerStrategy):
    """Drop the ``top_k`` layers with the most bytes, the earlier of equals; beyond the count, all of them."""

    top_k: int

    def choose(self, profiles: Sequence[LayerMemoryProfile]) -> Choice:
        num_dropped = whole_number(self.top_k, "top_k")
        sizes_bytes = [profile.activation_size_bytes for profile in profiles]
        # Python's sort is stable, also in reverse: equal sizes keep the list's order.
        largest_first = sorted(range(len(profiles)), key=sizes_bytes.__getitem__, reverse=True)
        return Choice(largest_first[:num_dropped])


@dataclass(frozen=True)
class SqrtLayers(LayerStrategy):
    """Save about √N boundaries and drop what lies between them, in segments of about equal bytes.

    After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). The total bytes are cut into
    K = √N (rounded) equal parts. A layer is a boundary, and saved, where the bytes up to and including it
    reach one of the cuts 1/K, 2/K, …, K/K that the bytes before it do not reach. A layer that reaches
    several cuts is one boundary, so there are at most K. Where no layer holds any byte, each counts as one.
    """

    def choose(self, profiles: Sequence[LayerMemoryProfile]) -> Choice:
        num_layers = len(profiles)
        # The nearest integer to √N, by integers: √N is never exactly a half.
        num_segments = (math.isqrt(4 * num_layers) + 1) // 2
        weights = [profile.activation_size_bytes for profile in profiles]
        total = sum(weights)
        if total == 0:
            weights, total = [1] * num_layers, num_layers
        dropped: list[int] = []
        reached = cuts_passed = 0
        for position, weight in enumerate(weights):
            reached += weight
            cuts_reached = reached * num_segments // total
            if cuts_reached == cuts_passed:
                dropped.append(position)
            cuts_passed = cuts_reached
        return Choice(dropped)


@dataclass(frozen=True)
class Budget(LayerStrategy):
    """Drop the layers that cost the least recompute such that the plan fits into ``max_memory_mb`` MiB.

    What must fit is the plan's own estimate: the bytes saved and the largest dropped layer. The budget in
    bytes is rounded down. Up to 200 layers the FLOPs are the least possible, and of such plans it is one
    with the fewest bytes; beyond, the plan's ``optimality_gap`` says how far they can be from the least. Of
    identical layers the earlier are dropped. A budget below the largest layer raises
    ``InfeasibleBudgetError``; an infinite one saves everything.
    """

    max_memory_mb: float | Fraction

    @classmethod
    def from_bytes(cls, max_memory_bytes: int) -> Budget:
        """Return the budget of exactly ``max_memory_bytes``."""
        return cls(Fraction(whole_number(max_memory_bytes, "max_memory_bytes", maximum=None), BYTES_PER_MIB))

    @property
    def max_memory_bytes(self) -> int | None:
        """The budget in whole bytes, rounded down; None where it is infinite."""
        allowed = "a number of MiB, at least 0"
        budget_mib = real_number(self.max_memory_mb, "max_memory_mb", allowed)
        if budget_mib < 0:
            raise InvalidParameterError(f"max_memory_mb must be {allowed}; got {shown(self.max_memory_mb)}")
        return None if isinstance(budget_mib, float) else math.floor(budget_mib * BYTES_PER_MIB)

    def choose(self, profiles: Sequence[LayerMemoryProfile]) -> Choice:
        # Only this strategy needs NumPy; the others, and the command line, start without it.
        from memfit.layers.budget import cheapest_drop

        budget_bytes = self.max_memory_bytes
        if budget_bytes is None:
            return Choice(())
        sizes_bytes = [profile.activation_size_bytes for profile in profiles]
        flops = [profile.recompute_flops for profile in profiles]
        return cheapest_drop(sizes_bytes, flops, budget_bytes)


def _of_type(profiles: Sequence[LayerMemoryProfile], wanted: LayerTypeHint) -> Choice:
    return Choice([position for position, profile in enumerate(profiles) if profile.layer_type is wanted])
