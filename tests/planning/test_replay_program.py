"""What the programs prove, against every choice there is."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.planning.brute_force import all_judgements
from tests.planning.drawn_profiles import drawn_profiles

from memfit.graph.model_profile import ModelProfile
from memfit.planning.bounds.bound import least_live_peak, single_time_lines
from memfit.planning.bounds.refinement import refined
from memfit.planning.bounds.replay_program import ReplayProgram
from memfit.planning.bounds.replay_rows import Program
from memfit.planning.candidates.trade_off import TradeOff
from memfit.planning.simulate.simulator import Judgement
from memfit.planning.step import Step


def some_program(model: ReplayProgram, data: st.DataObject) -> Program:
    return model.program(data.draw(st.sets(st.integers(0, model.step.num_ops - 1), min_size=1)))


def least_seconds_by_budget(judgements: list[Judgement]) -> dict[int, float]:
    return {
        budget: min(j.recompute_seconds for j in judgements if j.peak_bytes <= budget)
        for budget in sorted({judgement.peak_bytes for judgement in judgements})
    }


@settings(max_examples=60, deadline=None)
@given(drawn_profiles(max_forward_ops=6), st.booleans(), st.data())
def test_no_bound_is_above_the_best_plan(
    profile: ModelProfile, leave_out_statistics: bool, data: st.DataObject
) -> None:
    step = Step(profile)
    model = ReplayProgram(step, step.may_be_recomputed, leave_out_statistics=leave_out_statistics)
    assume(model.recipes)
    least_seconds = least_seconds_by_budget(all_judgements(profile))
    least_peak_bytes = min(least_seconds)
    program = some_program(model, data)
    lines = []
    for budget in least_seconds:
        relaxed = model.relaxed(program, budget)
        assert relaxed is not None
        assert relaxed.line is not None
        lines.append(relaxed.line)
    for budget, seconds in least_seconds.items():
        # A line that was found at one budget holds for all.
        assert max(line.seconds(budget) for line in lines) <= seconds
    fractional = model.relaxed_least_peak(program)
    assert fractional is not None
    assert fractional.least_peak_bytes <= least_peak_bytes


@settings(max_examples=40, deadline=None)
@given(drawn_profiles(max_forward_ops=6), st.data())
def test_whole_decisions_agree_with_the_fractional_ones_where_those_are_whole(
    profile: ModelProfile, data: st.DataObject
) -> None:
    step = Step(profile)
    model = ReplayProgram(step, step.may_be_recomputed)
    assume(model.recipes)
    program = some_program(model, data)
    budget = data.draw(st.sampled_from(sorted({j.peak_bytes for j in all_judgements(profile)})))
    relaxed = model.relaxed(program, budget)
    assert relaxed is not None
    whole = model.whole_near(program, budget, relaxed)
    if whole is not None:
        shares = relaxed.share_dropped
        assert {value for value in shares if shares[value] > 1 - 1e-6} <= whole
        assert not {value for value in shares if shares[value] < 1e-6} & whole


@settings(max_examples=60, deadline=None)
@given(drawn_profiles(max_forward_ops=6))
def test_lines_of_single_times_and_what_is_live_anyway_hold_for_every_plan(profile: ModelProfile) -> None:
    step = Step(profile)
    least_seconds = least_seconds_by_budget(all_judgements(profile))
    lines = list(single_time_lines(step, step.may_be_recomputed, range(step.num_ops)))
    for budget, seconds in least_seconds.items():
        assert max((line.seconds(budget) for line in lines), default=0.0) <= seconds + 1e-9  # Sums of floats.
    assert least_live_peak(step) <= min(least_seconds)


@settings(max_examples=40, deadline=None)
@given(drawn_profiles(max_forward_ops=6))
def test_refinement_proves_nothing_that_is_false_and_loses_no_candidate(profile: ModelProfile) -> None:
    step = Step(profile)
    judgements = all_judgements(profile)
    trade_off = TradeOff(step)
    trade_off.add(set())
    trade_off.add(set(step.plannable))
    before = trade_off.frontier()
    proofs = refined(trade_off)
    after = trade_off.frontier()
    for budget, seconds in least_seconds_by_budget(judgements).items():
        assert proofs.seconds(budget) <= seconds + 1e-9  # Sums of floats.
    assert proofs.least_peak_bytes <= min(judgement.peak_bytes for judgement in judgements)
    assert after[-1].peak_bytes <= before[-1].peak_bytes
    assert after[-1].peak_bytes >= min(judgement.peak_bytes for judgement in judgements)
