"""Memory that plans leave unused: found where it is, and used for what is expensive to restore."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.planning.drawn_profiles import drawn_profiles
from tests.planning.model_families import resnet

from memfit.graph.model_profile import ModelProfile
from memfit.planning.candidates.pool import Candidate, Pool
from memfit.planning.candidates.slack import slack_used, use_slack
from memfit.planning.simulate.simulator import judged
from memfit.planning.simulate.walk import Walk
from memfit.planning.step import Step
from memfit.planning.step.block_values import BlockValues


def drawn_plan(pool: Pool, data: st.DataObject) -> Candidate:
    return pool.add({value for value in pool.step.plannable if data.draw(st.booleans())})


@settings(max_examples=20, deadline=None)
@given(drawn_profiles(), st.data())
def test_where_nothing_is_absent_a_plan_has_all_that_the_plain_step_has(
    profile: ModelProfile, data: st.DataObject
) -> None:
    step = Step(profile)
    plan = drawn_plan(Pool(step), data)
    walk = Walk(step, plan.recomputed)
    memory_bytes, runs = walk.memory_bytes, list(walk.restorations())
    assert memory_bytes.max(initial=step.resident_bytes) == plan.peak_bytes
    # What nobody asks for again is absent for good.
    assume({value for run in runs for value in run.values} == plan.recomputed)
    with_all = memory_bytes.copy()
    for begin, end, num_bytes in (absence for run in runs for absence in run.absences):
        assert begin < end
        with_all[begin:end] += num_bytes
    assert len(memory_bytes) == step.num_ops + len(runs)
    assert with_all.max(initial=step.resident_bytes) >= judged(step, frozenset()).peak_bytes


@settings(max_examples=20, deadline=None)
@given(drawn_profiles(), st.data())
def test_a_plan_that_uses_slack_saves_more_within_the_budget_and_is_no_slower(
    profile: ModelProfile, data: st.DataObject
) -> None:
    pool = Pool(Step(profile))
    start = drawn_plan(pool, data)
    budget_bytes = start.peak_bytes + data.draw(st.integers(0, 64))
    better = slack_used(pool, start, budget_bytes)
    assert better.peak_bytes <= budget_bytes
    assert better.recomputed <= start.recomputed
    assert better.added_seconds < start.added_seconds or better == start
    assert Candidate(better.recomputed, *judged(pool.step, better.recomputed)) == better


@settings(max_examples=20, deadline=None)
@given(drawn_profiles(), st.data())
def test_with_room_for_all_nothing_that_takes_time_is_dropped(profile: ModelProfile, data: st.DataObject) -> None:
    pool = Pool(Step(profile))
    assert slack_used(pool, drawn_plan(pool, data), 2**60).added_seconds == 0.0


def plan_of_whole_blocks(pool: Pool) -> Candidate:
    return pool.add(pool.step.may_be_recomputed - BlockValues(pool.step).leaving())


def test_whole_blocks_get_back_what_their_own_peak_has_room_for() -> None:
    pool = Pool(Step(resnet()))
    blocks = plan_of_whole_blocks(pool)
    better = slack_used(pool, blocks, blocks.peak_bytes)
    assert better.peak_bytes <= blocks.peak_bytes
    # 0.92 when this was written.
    assert better.added_seconds < 0.95 * blocks.added_seconds


def test_slack_is_used_at_budgets_between_the_ends_of_the_frontier() -> None:
    pool = Pool(Step(resnet()))
    plain, blocks = pool.add(set()), plan_of_whole_blocks(pool)
    found = [pool.add(recomputed) for recomputed in use_slack(pool)]
    assert len(found) >= 64
    assert all(plan.peak_bytes < plain.peak_bytes for plan in found)
    assert found[-1].added_seconds < found[0].added_seconds < blocks.added_seconds
