"""Plans for profiles with compiled blocks: the fastest mixture of partitions, with or without the host's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from memfit.errors import InfeasibleBudgetError
from memfit.graph.compiled_data.compiled_blocks import CompiledKind, CompiledPlan, CompiledProfile
from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import FrontierPoint, Plan
from memfit.planning.partitions.offloaded_mix import OffloadedMix, mixes_within
from memfit.planning.partitions.partition_mix import PartitionMix
from memfit.units import format_bytes


def plan_of_compiled(profile: ModelProfile, budget_bytes: int, host_bytes: int = 0) -> Plan:
    """Return the fastest plan for compiled blocks whose peak is at most ``budget_bytes``.

    It may use ``host_bytes`` of the host's memory.
    """
    mix = _fastest(profile, budget_bytes, host_bytes)
    if mix is None:
        least_bytes = _least_peak_bytes(profile, host_bytes)
        raise InfeasibleBudgetError(
            f"the smallest budget found for this step with compiled blocks is {format_bytes(least_bytes)} (no mixture "
            f"of the measured partitions needs less), and the given one is {format_bytes(budget_bytes)} "
            f"({budget_bytes} bytes). Give at least budget={least_bytes}, use compile=False, compute the loss in "
            "chunks, or make the batch or the model smaller",
            minimum_bytes=least_bytes,
        )
    return _plan(profile, mix, budget_bytes)


def frontier_of_compiled(profile: ModelProfile, num_points: int, host_bytes: int = 0) -> tuple[FrontierPoint, ...]:
    """Return plans for compiled blocks from the fastest to the one with the smallest peak."""
    fastest = _fastest(profile, 2**62, 0)
    assert fastest is not None
    least_bytes, most_bytes = _least_peak_bytes(profile, host_bytes), fastest.peak_bytes
    points: list[FrontierPoint] = []
    for number in range(num_points):
        budget_bytes = most_bytes - (most_bytes - least_bytes) * number // max(num_points - 1, 1)
        mix = _fastest(profile, budget_bytes, host_bytes)
        assert mix is not None
        if not points or mix.peak_bytes < points[-1].peak_bytes:
            plan = _plan(profile, mix, None)
            points.append(FrontierPoint(plan.predicted_peak_bytes, plan.predicted_overhead, plan))
    return tuple(points)


def _compiled(profile: ModelProfile) -> CompiledProfile:
    assert profile.compiled is not None
    return profile.compiled


def _fastest(profile: ModelProfile, budget_bytes: int, host_bytes: int) -> OffloadedMix | None:
    """Return the fastest mixture; one that offloads only where that is faster."""
    mix = PartitionMix(_compiled(profile))
    choice = mix.fastest_within(budget_bytes)
    alone = None if choice is None else OffloadedMix(choice, {}, mix.peak_bytes(choice), mix.seconds(choice), 0)
    best = min(_offloading(profile, budget_bytes, host_bytes), key=lambda each: each.seconds, default=None)
    if best is None or (alone is not None and best.seconds >= alone.seconds):
        return alone
    return best


def _offloading(profile: ModelProfile, budget_bytes: int, host_bytes: int) -> Iterator[OffloadedMix]:
    if host_bytes and profile.link is not None:
        yield from mixes_within(_compiled(profile), budget_bytes, host_bytes, profile.link, profile.unthrottled_share)


def _least_peak_bytes(profile: ModelProfile, host_bytes: int) -> int:
    """Return the smallest peak of any mixture that is tried."""
    low, high = 0, PartitionMix(_compiled(profile)).least_peak_bytes()
    if not host_bytes or profile.link is None:
        return high
    # To a thousandth: each budget is tried with many mixtures.
    low = min((base.base_bytes for base in _compiled(profile).segments), default=0)
    while high - low > high // 1000:
        middle = (low + high) // 2
        found = min(_offloading(profile, middle, host_bytes), key=lambda each: each.peak_bytes, default=None)
        if found is None:
            low = middle
        else:
            high = min(middle, found.peak_bytes)
    return high


def _plan(profile: ModelProfile, mix: OffloadedMix, budget_bytes: int | None) -> Plan:
    compiled = _compiled(profile)
    names = {
        block.path: compiled.kinds[block.kind].partitions[number].name
        for block, number in zip(compiled.blocks, mix.choice, strict=True)
    }
    plain_seconds = compiled.plain_seconds or mix.seconds
    return Plan(
        decisions={},
        recorded_modules=(),
        hooked_modules=(),
        recompute_flops=0,
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
