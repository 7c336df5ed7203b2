"""Peaks as a GPU's allocator counts them: by hand, and what budgets promise for plans that are counted so."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.drawn_profiles import drawn_profiles
from tests.planning.test_recording_cost import profile_of

from memfit.errors import InfeasibleBudgetError
from memfit.graph.model_profile import HostCosts, ModelProfile
from memfit.graph.plan import Plan
from memfit.planning.candidates.pool import Candidate
from memfit.planning.planner import frontier, plan
from memfit.planning.simulate.allocator import margin_bytes
from memfit.planning.simulate.counted_peaks import CountedPeaks, counted_plain_peak_bytes
from memfit.planning.simulate.simulator import judged
from memfit.planning.simulate.traffic import Allocations, Buffer, Traffic
from memfit.planning.simulate.walk import Walk
from memfit.planning.step import Step

MIB = 2**20
# So quick that launching is no matter.
QUICK_HOST = HostCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def with_sizes(profile: ModelProfile, num_bytes: int) -> ModelProfile:
    return replace(profile, values=tuple(replace(value, num_bytes=num_bytes) for value in profile.values))


def candidate(step: Step, recomputed: set[int]) -> Candidate:
    return Candidate(frozenset(recomputed), *judged(step, recomputed))


def test_small_buffers_are_counted_to_the_byte_and_large_ones_as_their_blocks() -> None:
    # 12 MiB and a half leave more than 1 MiB of their segment of 14, which is cut off; 13 MiB and a half do not.
    traffic = Traffic([Buffer(512, 0, 1), Buffer(12 * MIB + MIB // 2, 0, 0), Buffer(13 * MIB + MIB // 2, 1, 1)], [0, 0])
    assert Allocations().run(traffic) == 512 + 14 * MIB
    assert Allocations().run(replace_workspaces(traffic, [0, 7])) == 512 + 14 * MIB + 7
    assert Allocations().run(replace_workspaces(traffic, [30 * MIB, 0])) == 512 + 12 * MIB + MIB // 2 + 30 * MIB


def replace_workspaces(traffic: Traffic, workspace_bytes: list[int]) -> Traffic:
    return traffic._replace(workspace_bytes=workspace_bytes)


def test_what_a_step_leaves_behind_goes_when_the_next_begins() -> None:
    allocations = Allocations()
    gradient = Traffic([Buffer(20 * MIB, 0, 1)], [0])
    assert [allocations.run(gradient) for _ in range(3)] == [20 * MIB] * 3
    # Its block is free then, and handed out whole.
    assert allocations.run(Traffic([Buffer(19 * MIB + 512, 0, 0)], [0])) == 20 * MIB


def test_the_past_decides_how_much_is_counted() -> None:
    fresh, used = Allocations(), Allocations()
    used.run(Traffic([Buffer(50 * MIB, 0, 0)], [0]))
    # Both come out of the block of 50 MiB, of which the second leaves less than 1 MiB.
    sizes = 36 * MIB + MIB // 2, 12 * MIB + MIB * 3 // 4
    later = Traffic([Buffer(sizes[0], 0, 1), Buffer(sizes[1], 1, 1)], [0, 0])
    assert deepcopy(used).run(later) == used.run(later) == 50 * MIB
    assert fresh.run(later) == sum(sizes)


def test_the_plain_step_is_counted_as_measured_and_plans_by_the_rules_with_a_margin() -> None:
    size = 13 * MIB
    measured = size + 3 * 14 * MIB + 12_345
    profile = replace(with_sizes(profile_of(["a", "b", "c"]), size), peak_bytes=measured)
    step = Step(profile)
    peaks = CountedPeaks(step)
    assert peaks.peak_bytes(candidate(step, set())) == measured
    # While "c" runs: the batch, which was there before, what "a" made, for the replay of "b", what "b" made, and "c".
    assert judged(step, {2}).peak_bytes == 4 * size
    assert peaks.peak_bytes(candidate(step, {2})) == size + 3 * 14 * MIB + margin_bytes([size] * 3)
    assert counted_plain_peak_bytes(step) == size + 3 * 14 * MIB


def test_where_the_plain_step_took_what_its_buffers_take_blocks_are_cut_to_the_byte() -> None:
    size, num_layers = 13 * MIB, 40
    profile = with_sizes(profile_of([f"{k}" for k in range(num_layers)]), size)
    taken, played = (num_layers + 1) * size, (num_layers + 1) * size + num_layers * MIB
    for past, counted in ((-6, played), (-5, taken), (0, taken), (5, taken), (6, played), (num_layers, played)):
        assert counted_plain_peak_bytes(Step(replace(profile, peak_bytes=taken + past * MIB))) == counted
    cut, whole = (Step(replace(profile, peak_bytes=peak_bytes)) for peak_bytes in (taken, played))
    dropping, margin = candidate(cut, {2, 4}), margin_bytes([size] * num_layers)
    assert CountedPeaks(cut).peak_bytes(dropping) == dropping.peak_bytes + margin
    assert CountedPeaks(whole).peak_bytes(dropping) >= dropping.peak_bytes + (num_layers - 2) * MIB + margin
    # What is left over of three is too little to tell.
    short = with_sizes(profile_of(["a", "b", "c"]), size)
    assert counted_plain_peak_bytes(Step(replace(short, peak_bytes=4 * size))) == 4 * size + 3 * MIB


def test_even_sizes_are_counted_as_they_are_with_a_margin() -> None:
    step = Step(with_sizes(profile_of(["a", "b", "c"]), 14 * MIB))
    assert CountedPeaks(step).peak_bytes(candidate(step, {2})) == 4 * 14 * MIB + 2 * MIB


def test_a_step_that_never_ran_on_a_device_is_counted_as_it_is() -> None:
    for profile in (profile_of(["a", "b", "c"], host=None), replace(profile_of(["a", "b", "c"]), device="cpu")):
        step = Step(with_sizes(profile, 13 * MIB))
        assert CountedPeaks(step).peak_bytes(candidate(step, {2})) == 4 * 13 * MIB
        assert counted_plain_peak_bytes(step) == judged(step, set()).peak_bytes


@st.composite
def gpu_profiles(draw: st.DrawFn) -> ModelProfile:
    """Draw a step whose buffers are a few MiB, odd or even, that ran on a GPU."""
    profile = draw(drawn_profiles())
    unit_bytes = draw(st.sampled_from((MIB, MIB + 512, MIB * 3 // 4, 2 * MIB)))
    values = tuple(replace(value, num_bytes=value.num_bytes * unit_bytes) for value in profile.values)
    ops = tuple(replace(op, workspace_bytes=op.workspace_bytes * unit_bytes) for op in profile.ops)
    profile = with_played_peak(replace(profile, values=values, ops=ops, device="cuda:0", host=QUICK_HOST))
    # Measured, it may have been a little more, or less.
    return replace(profile, peak_bytes=max(profile.peak_bytes + draw(st.integers(-20 * MIB, MIB)), 1))


def with_played_peak(profile: ModelProfile) -> ModelProfile:
    """Return the profile with the peak that a plain step by the rules would have."""
    step = Step(profile)
    allocations, traffic = Allocations(), Walk(step, frozenset()).traffic()
    return replace(profile, peak_bytes=step.resident_bytes + max(allocations.run(traffic) for _ in range(2)))


@given(gpu_profiles())
def test_no_step_is_counted_as_less_than_its_buffers_take(profile: ModelProfile) -> None:
    step = Step(profile)
    for recomputed in (set(), set(step.may_be_recomputed)):
        wanted = step.recomputed_of(recomputed)
        counted = step.resident_bytes + Allocations().run(Walk(step, wanted).traffic())
        assert counted >= judged(step, wanted).peak_bytes
        if all(size <= MIB or size % (2 * MIB) == 0 for size in sizes_of(profile)):
            assert counted == judged(step, wanted).peak_bytes


def sizes_of(profile: ModelProfile) -> list[int]:
    return [*(value.num_bytes for value in profile.values), *(op.workspace_bytes for op in profile.ops)]


def plan_or_minimum(profile: ModelProfile, budget_bytes: int) -> tuple[Plan | None, int]:
    try:
        return plan(profile, budget=budget_bytes), 0
    except InfeasibleBudgetError as error:
        return None, error.minimum_bytes


@settings(max_examples=20)
@given(gpu_profiles(), st.data())
def test_counted_peaks_keep_what_budgets_promise(profile: ModelProfile, data: st.DataObject) -> None:
    points = frontier(profile, points=6)
    assert all(a.peak_bytes > b.peak_bytes and a.overhead <= b.overhead for a, b in pairwise(points))
    assert (points[0].peak_bytes, points[0].overhead) == (profile.peak_bytes, 0.0)
    budgets = sorted(data.draw(st.lists(st.integers(0, 2 * points[0].peak_bytes), max_size=6)))
    budgets += [point.peak_bytes for point in points]
    made: list[Plan] = []
    for budget in sorted(budgets):
        planned, minimum_bytes = plan_or_minimum(profile, budget)
        if planned is None:
            assert budget < minimum_bytes <= points[-1].peak_bytes
            assert plan(profile, budget=minimum_bytes).predicted_peak_bytes == minimum_bytes
            assert not made
        else:
            assert planned.predicted_peak_bytes <= budget
            assert planned.optimality_gap >= 0.0
            made.append(planned)
    for smaller, larger in pairwise(made):
        assert smaller.predicted_overhead >= larger.predicted_overhead
        assert smaller.predicted_peak_bytes <= larger.predicted_peak_bytes
    for point in points:
        assert plan(profile, budget=point.peak_bytes).predicted_overhead <= point.overhead


def test_a_plan_that_only_seems_to_fit_is_passed_over() -> None:
    profile = with_played_peak(with_sizes(profile_of(["a", "b", "c", "d", "e"]), 13 * MIB))
    smallest, by_bytes = (frontier(replace(profile, device=device))[-1] for device in ("cuda:0", "cpu"))
    assert by_bytes.peak_bytes < smallest.peak_bytes - 5 * MIB
    for budget_bytes in (by_bytes.peak_bytes, smallest.peak_bytes - 1):
        with pytest.raises(InfeasibleBudgetError) as raised:
            plan(profile, budget=budget_bytes)
        assert raised.value.minimum_bytes == smallest.peak_bytes
    assert plan(profile, budget=smallest.peak_bytes).predicted_peak_bytes == smallest.peak_bytes
