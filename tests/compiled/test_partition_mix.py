"""The choice of partitions against all choices of small models, and what plans and frontiers promise."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

import memfit
from memfit.graph.compiled_data.compiled_blocks import (
    CompiledBlock,
    CompiledKind,
    CompiledProfile,
    MeasuredPartition,
    Partition,
    SegmentKind,
    StepSegment,
)
from memfit.graph.model_profile import ModelProfile
from memfit.planning.partitions.partition_mix import PartitionMix


def drawn_profile(seed: int, num_blocks: int = 5, num_partitions: int = 3) -> CompiledProfile:
    """Return a step with blocks of one kind, whose partitions hold less and take longer from one to the next."""
    draw = random.Random(seed)
    paths = tuple(f"blocks.{place}" for place in range(num_blocks))
    names = ["everything", *(f"cut {number}" for number in range(1, num_partitions))]
    kind = CompiledKind("Block", paths, tuple(Partition(name, 0.1, {"graph": (name,)}) for name in names))
    blocks = []
    for path in paths:
        held = sorted((draw.randint(0, 50) for _ in names), reverse=True)
        seconds = sorted(draw.uniform(1, 2) for _ in names)
        blocks.append(
            CompiledBlock(
                path,
                0,
                tuple(
                    MeasuredPartition(
                        *(held_bytes, draw.randint(0, 30), draw.randint(0, 60), each),
                        output_bytes=draw.choice((0, 7, 20)),
                        keeps_input=draw.random() < 0.6,
                    )
                    for held_bytes, each in zip(held, seconds, strict=True)
                ),
            )
        )
    segments = [StepSegment(SegmentKind.OUTSIDE, None, 0, 100)]
    for place in range(num_blocks):
        segments.append(StepSegment(SegmentKind.FORWARD, place, place, draw.randint(90, 110)))
        segments.append(StepSegment(SegmentKind.OUTSIDE, None, place + 1, draw.randint(90, 110)))
    for place in reversed(range(num_blocks)):
        segments.append(StepSegment(SegmentKind.BACKWARD, place, place + 1, draw.randint(90, 130)))
        segments.append(StepSegment(SegmentKind.OUTSIDE, None, place, draw.randint(90, 130)))
    return CompiledProfile((kind,), tuple(blocks), tuple(segments), 3.0, 10.0)


def walked_peak(profile: CompiledProfile, choice: tuple[int, ...]) -> int:
    """Return the peak of a choice, by walking through the step."""
    measured = [block.measured[number] for block, number in zip(profile.blocks, choice, strict=True)]
    peak = 0
    for segment in profile.segments:
        holding = measured[: segment.num_held]
        above = sum(each.held_bytes for each in holding)
        above += sum(one.output_bytes for one, after in itertools.pairwise(holding) if not after.keeps_input)
        if segment.block is not None:
            own = measured[segment.block]
            above += own.forward_bytes if segment.kind is SegmentKind.FORWARD else own.output_bytes + own.backward_bytes
        peak = max(peak, segment.base_bytes + above)
    return peak


def all_choices(profile: CompiledProfile) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(block.measured)) for block in profile.blocks)))


def model_profile(compiled: CompiledProfile) -> ModelProfile:
    return ModelProfile((), (), (), 400, 10.0, "cpu", "model", compiled=compiled)


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_fastest_of_all_within_the_budget(seed: int) -> None:
    profile = drawn_profile(seed)
    mix = PartitionMix(profile)
    peaks = {choice: walked_peak(profile, choice) for choice in all_choices(profile)}
    assert all(mix.peak_bytes(choice) == peak for choice, peak in peaks.items())
    assert mix.least_peak_bytes() == min(peaks.values())
    for budget_bytes in range(min(peaks.values()), max(peaks.values()) + 1, 7):
        choice = mix.fastest_within(budget_bytes)
        assert choice is not None
        assert peaks[choice] <= budget_bytes
        fastest = min(mix.seconds(each) for each, peak in peaks.items() if peak <= budget_bytes)
        assert mix.seconds(choice) == pytest.approx(fastest)
    assert mix.fastest_within(min(peaks.values()) - 1) is None


def test_passes_that_are_not_nested_count_with_all_that_may_be_held() -> None:
    profile = drawn_profile(3, num_blocks=2)
    # The first block's backward pass runs while the second block still holds what it saved.
    crossed = StepSegment(SegmentKind.BACKWARD, 0, 2, 150)
    profile = replace(profile, segments=(*profile.segments, crossed))
    mix = PartitionMix(profile)
    assert all(mix.peak_bytes(choice) >= walked_peak(profile, choice) for choice in all_choices(profile))


def test_a_plan_names_a_partition_for_each_block_and_keeps_the_reference() -> None:
    profile = model_profile(drawn_profile(1))
    with pytest.raises(memfit.InfeasibleBudgetError) as caught:
        memfit.plan(profile, budget=1)
    plan = memfit.plan(profile, budget=caught.value.minimum_bytes)
    assert plan.predicted_peak_bytes == caught.value.minimum_bytes
    assert plan.compiled is not None
    assert set(plan.compiled.choice) == {f"blocks.{place}" for place in range(5)}
    assert set(plan.compiled.reference().choice.values()) == {"everything"}
    assert plan.changes_anything


def test_the_frontier_gets_smaller_and_slower() -> None:
    points = memfit.frontier(model_profile(drawn_profile(5, num_blocks=12)), points=9)
    assert len(points) > 3
    for a, b in itertools.pairwise(points):
        assert a.peak_bytes > b.peak_bytes
        assert a.overhead <= b.overhead


@pytest.mark.parametrize("budget", [2**62, 2**63, 10**30, "9999999999999GiB"])
def test_any_budget_above_the_peak_gives_the_fastest_plan(budget: int | str) -> None:
    profile = model_profile(drawn_profile(1))
    fastest = memfit.frontier(profile)[0].plan
    assert memfit.plan(profile, budget=budget).compiled == fastest.compiled


def test_compiled_profiles_take_a_budget_and_nothing_else() -> None:
    profile = model_profile(drawn_profile(1))
    with pytest.raises(memfit.InvalidParameterError, match="give a budget"):
        memfit.plan(profile, strategy=memfit.Full())
    with pytest.raises(memfit.InvalidParameterError, match="give a budget"):
        memfit.plan(profile, budget=10_000, force_save=["*::aten.mm"])
    with pytest.raises(memfit.InvalidParameterError, match="nowhere to offload to"):
        memfit.frontier(profile, host_budget="1MiB")
