"""Plans over layers: what a strategy's choice means in bytes and FLOPs. No choice is made here.

The words are those of selective checkpointing: a *checkpointed* layer is dropped and recomputed, a *saved*
layer is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

from memfit.errors import EmptyProfilesError, InvalidParameterError, LayerIndexError
from memfit.layers.profile import LayerMemoryProfile, checked_profiles
from memfit.layers.strategies import LayerStrategy
from memfit.layers.validation import shown


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
    total_activation_memory_bytes: int
    total_recompute_flops: int
    dropped_activation_bytes: int = 0
    saved_activation_bytes: int = 0
    optimality_gap: float = 0.0

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
    dropped, saved = _split(profiles, plan)
    working_set_bytes = max((layer.activation_size_bytes for layer in dropped), default=0)
    return sum(layer.activation_size_bytes for layer in saved) + working_set_bytes


def estimate_total_recompute_flops(profiles: Iterable[LayerMemoryProfile], plan: CheckpointPlan) -> int:
    """Return the FLOPs of computing every dropped layer again; the plan must be one for ``profiles``."""
    dropped, _ = _split(profiles, plan)
    return sum(layer.recompute_flops for layer in dropped)


def activation_stats(profiles: Iterable[LayerMemoryProfile], plan: CheckpointPlan) -> ActivationStats:
    """Return the plan's peak, the mean layer and the counts; the plan must be one for ``profiles``."""
    layers = checked_profiles(profiles)
    total_bytes = sum(layer.activation_size_bytes for layer in layers)
    return ActivationStats(
        peak_memory_bytes=estimate_memory_with_plan(layers, plan),
        mean_activation_size_bytes=_share(total_bytes, len(layers)),
        total_layers=len(layers),
        checkpointed_layers=len(plan.checkpointed_layers),
        total_activation_bytes=total_bytes,
    )


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


def _split(
    profiles: Iterable[LayerMemoryProfile], plan: CheckpointPlan
) -> tuple[list[LayerMemoryProfile], list[LayerMemoryProfile]]:
    """Return the dropped and the saved layers, after checking that ``plan`` is one for ``profiles``."""
    layers = checked_profiles(profiles)
    if not isinstance(plan, CheckpointPlan):
        raise InvalidParameterError(
            f"plan must be a CheckpointPlan, as build_checkpoint_plan returns; got {shown(plan)}"
        )
    layer_of = {layer.layer_idx: layer for layer in layers}
    try:
        named = [*plan.checkpointed_layers, *plan.saved_layers]
        distinct = set(named)
    except TypeError:
        raise InvalidParameterError(
            "the plan's checkpointed_layers and saved_layers must be tuples of layer_idx; "
            f"got {shown(plan.checkpointed_layers)} and {shown(plan.saved_layers)}"
        ) from None
    for layer_idx in named:
        if layer_idx not in layer_of:
            _refuse_unknown_layer(layer_idx, layers)
    if len(distinct) < len(named):
        repeated = next(layer_idx for layer_idx in named if named.count(layer_idx) > 1)
        raise InvalidParameterError(
            f"the plan names layer {repeated} more than once; a layer is either dropped or saved"
        )
    if len(named) < len(layers):
        missing = next(layer_idx for layer_idx in layer_of if layer_idx not in distinct)
        raise InvalidParameterError(
            f"the plan says nothing about layer {missing}; it names {len(named)} layers and the profiles "
            f"have {len(layers)}; build the plan from these profiles"
        )
    return [layer_of[i] for i in plan.checkpointed_layers], [layer_of[i] for i in plan.saved_layers]


def _refuse_unknown_layer(layer_idx: object, layers: Sequence[LayerMemoryProfile]) -> None:
    if not layers:
        raise EmptyProfilesError(
            f"the plan names layer {layer_idx!r}, but the list of profiles is empty; "
            "give the profiles that the plan was built from"
        )
    indices = [layer.layer_idx for layer in layers]
    raise LayerIndexError(
        f"the plan names layer {layer_idx!r}, which is not among the {len(layers)} profiles (layer_idx "
        f"from {min(indices)} to {max(indices)}); give the profiles that the plan was built from"
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
