"""Plans for profiles with compiled blocks: the fastest mixture of partitions, with or without the host's memory.

What the eager engine recomputes outside blocks is one more choice, with a menu of a few measured entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from memfit.errors import InfeasibleBudgetError
from memfit.graph.compiled_data.compiled_blocks import CompiledKind, CompiledPlan, CompiledProfile, OutsideChoice
from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import FrontierPoint, Plan
from memfit.planning.partitions.offloaded_mix import OffloadedMix, mixes_within
from memfit.planning.partitions.outside_values import indices_of, plan_outside
from memfit.planning.partitions.partition_mix import PartitionMix
from memfit.units import format_bytes

# More than there is, and not too much for the sums of arrays.
_ANY_BYTES = 2**62


class _StepMix(NamedTuple):
    """What the eager engine recomputes outside blocks, and the mixture of partitions."""

    outside: OutsideChoice | None
    mix: OffloadedMix


def plan_of_compiled(profile: ModelProfile, budget_bytes: int, host_bytes: int = 0) -> Plan:
    """Return the fastest plan for compiled blocks whose peak is at most ``budget_bytes``.

    It may use ``host_bytes`` of the host's memory.
    """
    chosen = _fastest(profile, min(budget_bytes, _ANY_BYTES), host_bytes)
    if chosen is None:
        least_bytes = _least_peak_bytes(profile, host_bytes)
        chunking = "" if profile.chunks_loss else "chunk_loss=True if it is a language model, "
        raise InfeasibleBudgetError(
            f"the smallest budget found for this step with compiled blocks is {format_bytes(least_bytes)} (no mixture "
            f"of the measured partitions needs less), and the given one is {format_bytes(budget_bytes)} "
            f"({budget_bytes} bytes). Give at least budget={least_bytes}, use compile=False, {chunking}or make the "
            "batch or the model smaller",
            minimum_bytes=least_bytes,
        )
    return _plan(profile, chosen, budget_bytes)


def frontier_of_compiled(profile: ModelProfile, num_points: int, host_bytes: int = 0) -> tuple[FrontierPoint, ...]:
    """Return plans for compiled blocks from the fastest to the one with the smallest peak."""
    fastest = _fastest(profile, _ANY_BYTES, 0)
    assert fastest is not None
    least_bytes, most_bytes = _least_peak_bytes(profile, host_bytes), fastest.mix.peak_bytes
    points: list[FrontierPoint] = []
    least_seconds = math.inf
    for number in reversed(range(num_points)):
        budget_bytes = most_bytes - (most_bytes - least_bytes) * number // max(num_points - 1, 1)
        chosen = _fastest(profile, budget_bytes, host_bytes)
        assert chosen is not None
        # Mixtures that offload are chosen without the time that they wait for the link.
        if chosen.mix.seconds < least_seconds:
            least_seconds = chosen.mix.seconds
            plan = _plan(profile, chosen, None)
            points.append(FrontierPoint(plan.predicted_peak_bytes, plan.predicted_overhead, plan))
    return tuple(reversed(points))


def _compiled(profile: ModelProfile) -> CompiledProfile:
    assert profile.compiled is not None
    return profile.compiled


def _steps(profile: ModelProfile) -> list[tuple[OutsideChoice | None, PartitionMix]]:
    """Return the measured step, and the same with each choice of what is recomputed outside blocks."""
    compiled = _compiled(profile)
    others = [(outside, PartitionMix(compiled.with_outside(outside))) for outside in compiled.outside]
    return [(None, PartitionMix(compiled)), *others]


def _tried(profile: ModelProfile, budget_bytes: int, host_bytes: int) -> Iterator[_StepMix]:
    """Yield, for each of the steps, the fastest mixture that holds what it saves, and some that offload."""
    for outside, mix in _steps(profile):
        choice = mix.fastest_within(budget_bytes)
        if choice is not None:
            yield _StepMix(outside, OffloadedMix(choice, {}, mix.peak_bytes(choice), mix.seconds(choice), 0))
        if host_bytes and profile.link is not None:
            offloading = mixes_within(mix.profile, budget_bytes, host_bytes, profile.link, profile.unthrottled_share)
            yield from (_StepMix(outside, each) for each in offloading)


def _fastest(profile: ModelProfile, budget_bytes: int, host_bytes: int) -> _StepMix | None:
    """Return the fastest mixture; one that offloads, or recomputes outside blocks, only where that is faster."""
    return min(_tried(profile, budget_bytes, host_bytes), key=lambda choice: choice.mix.seconds, default=None)


def _least_peak_bytes(profile: ModelProfile, host_bytes: int) -> int:
    """Return the smallest peak of any mixture that is tried."""
    low, high = 0, min(mix.least_peak_bytes() for _, mix in _steps(profile))
    # To a thousandth: each budget is tried with many mixtures.
    while host_bytes and profile.link is not None and high - low > high // 1000:
        middle = (low + high) // 2
        found = min((tried.mix.peak_bytes for tried in _tried(profile, middle, host_bytes)), default=None)
        if found is None:
            low = middle
        else:
            high = min(middle, found)
    return high


def _plan(profile: ModelProfile, chosen: _StepMix, budget_bytes: int | None) -> Plan:
    compiled, mix = _compiled(profile), chosen.mix
    names = {
        block.path: compiled.kinds[block.kind].partitions[number].name
        for block, number in zip(compiled.blocks, mix.choice, strict=True)
    }
    plain_seconds = compiled.plain_seconds or mix.seconds
    outside = chosen.outside
    eager = plan_outside(profile, indices_of(profile, outside.recomputed)) if outside is not None else None
    return Plan(
        decisions={} if eager is None else eager.decisions,
        recorded_modules=() if eager is None else eager.recorded_modules,
        hooked_modules=() if eager is None else eager.hooked_modules,
        recompute_flops=0 if eager is None else eager.recompute_flops,
        outline=None if eager is None else eager.outline,
        fingerprint=profile.fingerprint,
        predicted_peak_bytes=mix.peak_bytes,
        predicted_overhead=mix.seconds / plain_seconds - 1 if plain_seconds else 0.0,
        budget_bytes=budget_bytes,
        inputs=profile.inputs,
        host_bytes=mix.host_bytes,
        chunks_loss=profile.chunks_loss,
        compiled=CompiledPlan(tuple(_with_used(kind, names) for kind in compiled.kinds), names, mix.offloaded),
    )


def _with_used(kind: CompiledKind, names: Mapping[str, str]) -> CompiledKind:
    """Return the kind with the partitions that its blocks use, and the one that gradients are compared with."""
    used = {kind.partitions[0].name, *(names[path] for path in kind.blocks)}
    return replace(kind, partitions=tuple(partition for partition in kind.partitions if partition.name in used))
