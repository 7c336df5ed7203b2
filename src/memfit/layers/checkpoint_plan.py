"""Plans over layers: what a strategy's choice means in bytes and FLOPs. No choice is made here.

The words are those of selective checkpointing: a *checkpointed* layer is dropped and recomputed, a *saved*
layer is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NoReturn

from memfit.errors import EmptyProfilesError, InvalidParameterError, LayerIndexError
from memfit.graph.layer_profile import LayerMemoryProfile, checked_profiles
from memfit.graph.records import Count, Gap
from memfit.layers.strategies import LayerStrategy
from memfit.validation import shown


@dataclass(frozen=True)
class CheckpointPlan:
    """The layers dropped and the layers saved, by ``layer_idx`` in the profiles' order, and what that costs.

    ``total_activation_memory_bytes`` is the working set of the recompute: the largest dropped layer.
    ``optimality_gap`` bounds how far the FLOPs are above the least possible for a ``Budget``, as a share of
    the proven lower bound; it is 0.0 where they are the least, and for strategies that do not minimise.
    ``build_checkpoint_plan`` fills in the two byte counts.
    """

    checkpointed_layers: tuple[int, ...]
    saved_layers: tuple[int, ...]
    total_activation_memory_bytes: Count
    total_recompute_flops: Count
    dropped_activation_bytes: Count = 0
    saved_activation_bytes: Count = 0
    optimality_gap: Gap = 0.0

    @property
    def checkpoint_ratio(self) -> float:
        """The share of the layers, by count, that is dropped; 0 without layers."""
        return _share(len(self.checkpointed_layers), len(self.checkpointed_layers) + len(self.saved_layers))

    @property
    def estimated_memory_reduction_ratio(self) -> float:
        """The same share of layers by count, under its older name; the two ratios below are of bytes."""
        return self.checkpoint_ratio

    @property
    def dropped_bytes_ratio(self) -> float:
        """The share of the activation bytes that is dropped; 0 without bytes."""
        return _share(self.dropped_activation_bytes, self.dropped_activation_bytes + self.saved_activation_bytes)

    @property
    def peak_reduction_ratio(self) -> float:
        """How much lower the estimated peak is than with all saved, as a share of the activation bytes."""
        return _share(
            self.dropped_activation_bytes - self.total_activation_memory_bytes,
            self.dropped_activation_bytes + self.saved_activation_bytes,
        )


@dataclass(frozen=True)
class ActivationStats:
    """A plan in numbers for a reader; ``checkpointed_layers`` is how many are dropped."""

    peak_memory_bytes: int
    mean_activation_size_bytes: float
    total_layers: int
    checkpointed_layers: int
    total_activation_bytes: int = 0

    @property
    def memory_reduction_percent(self) -> float:
        """The percentage of the layers, by count, that is dropped; 0 without layers."""
        return 100.0 * _share(self.checkpointed_layers, self.total_layers)

    @property
    def peak_reduction_percent(self) -> float:
        """The percentage of all activation bytes by which the peak is lower than with everything saved."""
        return 100.0 * _share(self.total_activation_bytes - self.peak_memory_bytes, self.total_activation_bytes)


def build_checkpoint_plan(profiles: Iterable[LayerMemoryProfile], strategy: LayerStrategy) -> CheckpointPlan:
    """Return the plan that ``strategy`` gives for ``profiles``; an empty list gives an empty plan."""
    layers = checked_profiles(profiles)
    if not isinstance(strategy, LayerStrategy):
        raise InvalidParameterError(
            f"strategy must be a strategy object such as Full() or EveryNthLayer(2); got {shown(strategy)}"
        )
    choice = strategy.choose(layers)
    is_dropped = _marks(choice.dropped_positions, len(layers), strategy)
    is_saved = is_dropped.translate(bytes([1, 0]) + bytes(254))
    layer_indices = [layer.layer_idx for layer in layers]
    sizes_bytes = [layer.activation_size_bytes for layer in layers]
    return CheckpointPlan(
        checkpointed_layers=tuple(compress(layer_indices, is_dropped)),
        saved_layers=tuple(compress(layer_indices, is_saved)),
        total_activation_memory_bytes=max(compress(sizes_bytes, is_dropped), default=0),
        total_recompute_flops=sum(layer.recompute_flops for layer in compress(layers, is_dropped)),
        dropped_activation_bytes=sum(compress(sizes_bytes, is_dropped)),
        saved_activation_bytes=sum(compress(sizes_bytes, is_saved)),
        optimality_gap=choice.optimality_gap,
    )


def estimate_memory_with_plan(profiles: Iterable[LayerMemoryProfile], plan: CheckpointPlan) -> int:
    """Return the peak bytes under ``plan``: all that is saved, and the largest dropped layer, recomputed.

    The plan must name each layer of ``profiles`` once and no other.
    """
    layers, is_dropped = _matched(profiles, plan)
    sizes_bytes = [layer.activation_size_bytes for layer in layers]
    return _peak_bytes(sizes_bytes, is_dropped)


def estimate_total_recompute_flops(profiles: Iterable[LayerMemoryProfile], plan: CheckpointPlan) -> int:
    """Return the FLOPs of computing every dropped layer again; the plan must be one for ``profiles``."""
    layers, is_dropped = _matched(profiles, plan)
    return sum(layer.recompute_flops for layer in compress(layers, is_dropped))


def activation_stats(profiles: Iterable[LayerMemoryProfile], plan: CheckpointPlan) -> ActivationStats:
    """Return the plan's peak, the mean layer and the counts; the plan must be one for ``profiles``."""
    layers, is_dropped = _matched(profiles, plan)
    sizes_bytes = [layer.activation_size_bytes for layer in layers]
    total_bytes = sum(sizes_bytes)
    return ActivationStats(
        peak_memory_bytes=_peak_bytes(sizes_bytes, is_dropped),
        mean_activation_size_bytes=_share(total_bytes, len(layers)),
        total_layers=len(layers),
        checkpointed_layers=len(plan.checkpointed_layers),
        total_activation_bytes=total_bytes,
    )


def _peak_bytes(sizes_bytes: Sequence[int], is_dropped: Sequence[bool]) -> int:
    dropped_sizes = list(compress(sizes_bytes, is_dropped))
    return sum(sizes_bytes) - sum(dropped_sizes) + max(dropped_sizes, default=0)


def _matched(
    profiles: Iterable[LayerMemoryProfile], plan: CheckpointPlan
) -> tuple[list[LayerMemoryProfile], list[bool]]:
    """Return the layers and whether each is dropped, after checking that ``plan`` names each of them once."""
    layers = checked_profiles(profiles)
    if not isinstance(plan, CheckpointPlan):
        raise InvalidParameterError(
            f"plan must be a CheckpointPlan, as build_checkpoint_plan returns; got {shown(plan)}"
        )
    layer_indices = [layer.layer_idx for layer in layers]
    try:
        num_named = len(plan.checkpointed_layers) + len(plan.saved_layers)
        dropped = set(plan.checkpointed_layers)
        named = dropped.union(plan.saved_layers)
    except TypeError:
        raise InvalidParameterError(
            "the plan's checkpointed_layers and saved_layers must be tuples of layer_idx; "
            f"got {shown(plan.checkpointed_layers)} and {shown(plan.saved_layers)}"
        ) from None
    # As many names as layers, and every layer among them: then neither side has a repetition or a stranger.
    if not num_named == len(named) == len(layers) or named != set(layer_indices):
        _refuse_plan([*plan.checkpointed_layers, *plan.saved_layers], layer_indices)
    return layers, [layer_idx in dropped for layer_idx in layer_indices]


def _marks(positions: Iterable[int], num_layers: int, strategy: LayerStrategy) -> bytearray:
    """Return a 1 for each position that is dropped. Strategies may be users' own, so positions are checked."""
    marks = bytearray(num_layers)
    try:
        for position in positions:
            if position < 0:
                raise IndexError
            marks[position] = 1
    except (TypeError, IndexError):
        raise InvalidParameterError(
            f"{type(strategy).__name__} chose {shown(positions)}; "
            f"it must choose positions in the list of layers, from 0 to {num_layers - 1}"
        ) from None
    return marks


def _refuse_plan(named: Sequence[object], layer_indices: Sequence[int]) -> NoReturn:
    """Raise the error for a plan that names other layers than the profiles with these indices."""
    known = set(layer_indices)
    unknown = next((layer_idx for layer_idx in named if layer_idx not in known), None)
    if unknown is not None and not known:
        raise EmptyProfilesError(
            f"the plan names layer {unknown!r}, but the list of profiles is empty; "
            "give the profiles that the plan was built from"
        )
    if unknown is not None:
        raise LayerIndexError(
            f"the plan names layer {unknown!r}, which is not among the {len(known)} profiles (layer_idx from "
            f"{min(known)} to {max(known)}); give the profiles that the plan was built from"
        )
    times_named = Counter(named)
    repeated = next((layer_idx for layer_idx, times in times_named.items() if times > 1), None)
    if repeated is not None:
        raise InvalidParameterError(
            f"the plan names layer {repeated} more than once; a layer is either dropped or saved"
        )
    missing = next(layer_idx for layer_idx in layer_indices if layer_idx not in times_named)
    raise InvalidParameterError(
        f"the plan says nothing about layer {missing}; it names {len(named)} layers and the profiles have "
        f"{len(known)}; build the plan from these profiles"
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
