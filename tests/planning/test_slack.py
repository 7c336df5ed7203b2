"""Memory that plans leave unused: found where it is, and used for what is expensive to restore."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.planning.drawn_profiles import drawn_profiles
from tests.planning.model_families import resnet

from memfit.graph.model_profile import Link, ModelProfile
from memfit.planning.candidates.pool import Candidate
from memfit.planning.candidates.slack import Judge, slack_used, slack_used_at_budgets
from memfit.planning.offload.offloadable import held_by, may_be_offloaded
from memfit.planning.simulate.simulator import judged
from memfit.planning.simulate.walk import Walk
from memfit.planning.step import Step
from memfit.planning.step.block_values import BlockValues
from memfit.planning.step.offload_rules import NOTHING_OFFLOADED, Offloading

LINK = Link(out_bytes_per_second=8.0, back_bytes_per_second=8.0, seconds_per_copy=0.01, host_free_bytes=2**30)


def drawn_plan(step: Step, data: st.DataObject) -> Candidate:
    """Recompute some values, and offload some of those that are held then."""
    recomputed = frozenset(step.recomputed_of({value for value in step.plannable if data.draw(st.booleans())}))
    held = held_by(step, recomputed, may_be_offloaded(step))
    sent = frozenset(value for value in held if data.draw(st.booleans()))
    return judge_of(step)(recomputed, Offloading(sent, data.draw(st.integers(1, 64)) if sent else 0))


def judge_of(step: Step) -> Judge:
    def judge(recomputed: frozenset[int], offloading: Offloading) -> Candidate:
        really = frozenset(step.recomputed_of(recomputed))
        return Candidate(really, *judged(step, really, offloading), offloading)

    return judge


@settings(max_examples=20, deadline=None)
@given(drawn_profiles(), st.data())
def test_where_nothing_is_absent_a_plan_has_all_that_the_plain_step_has(
    profile: ModelProfile, data: st.DataObject
) -> None:
    step = Step(replace(profile, link=LINK))
    plan = drawn_plan(step, data)
    walk = Walk(step, plan.recomputed, plan.offloading)
    memory_bytes, runs = walk.memory_bytes, list(walk.restorations())
    assert memory_bytes.max(initial=step.resident_bytes) == plan.peak_bytes
    back = {value for run in runs for value in run.values}
    # What nobody asks for again is absent for good.
    assume(back == plan.recomputed | plan.offloading.values)
    assert {run.values for run in runs if run.op is None} == {(value,) for value in plan.offloading.values}
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
    step = Step(replace(profile, link=LINK))
    start = drawn_plan(step, data)
    budget_bytes = start.peak_bytes + data.draw(st.integers(0, 64))
    better = slack_used(step, judge_of(step), start, budget_bytes)
    assert better.peak_bytes <= budget_bytes
    assert better.recomputed <= start.recomputed
    assert better.offloading.values <= start.offloading.values
    assert better.added_seconds < start.added_seconds or better == start
    assert (
        Candidate(better.recomputed, *judged(step, better.recomputed, better.offloading), better.offloading) == better
    )


@settings(max_examples=20, deadline=None)
@given(drawn_profiles(), st.data())
def test_with_room_for_all_nothing_that_takes_time_is_dropped(profile: ModelProfile, data: st.DataObject) -> None:
    step = Step(replace(profile, link=LINK))
    assert slack_used(step, judge_of(step), drawn_plan(step, data), 2**60).added_seconds == 0.0


def plan_of_whole_blocks(step: Step) -> Candidate:
    return judge_of(step)(step.may_be_recomputed - BlockValues(step).leaving(), NOTHING_OFFLOADED)


def test_whole_blocks_get_back_what_their_own_peak_has_room_for() -> None:
    step = Step(resnet())
    blocks = plan_of_whole_blocks(step)
    better = slack_used(step, judge_of(step), blocks, blocks.peak_bytes)
    assert better.peak_bytes <= blocks.peak_bytes
    # 0.92 when this was written.
    assert better.added_seconds < 0.95 * blocks.added_seconds


def test_budgets_lie_between_the_ends_of_the_frontier() -> None:
    step = Step(resnet())
    plain, blocks = judge_of(step)(frozenset(), NOTHING_OFFLOADED), plan_of_whole_blocks(step)
    found = list(slack_used_at_budgets(step, judge_of(step), [plain, blocks]))
    assert len(found) >= 64
    assert all(plan.peak_bytes < plain.peak_bytes for plan in found)
    assert found[-1].added_seconds < found[0].added_seconds < blocks.added_seconds
