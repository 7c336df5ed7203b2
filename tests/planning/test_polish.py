"""Polishing a plan: never slower, never over the budget, and all the way where there is room."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.drawn_profiles import drawn_profiles

from memfit.graph.model_profile import ModelProfile
from memfit.planning.candidates.polish import polished
from memfit.planning.candidates.trade_off import Candidate, TradeOff
from memfit.planning.simulate.simulator import judged
from memfit.planning.step import Step


@settings(max_examples=80, deadline=None)
@given(drawn_profiles(), st.data())
def test_a_polished_plan_is_no_slower_and_within_the_budget(profile: ModelProfile, data: st.DataObject) -> None:
    step = Step(profile)
    trade_off = TradeOff(step)
    start = trade_off.add({value for value in step.plannable if data.draw(st.booleans())})
    budget_bytes = start.peak_bytes + data.draw(st.integers(0, 64))
    better = polished(trade_off, start, budget_bytes, most_tries=data.draw(st.integers(0, 60)))
    assert better.peak_bytes <= budget_bytes
    assert better.added_seconds <= start.added_seconds
    assert Candidate(better.recomputed, *judged(step, better.recomputed)) == better


@settings(max_examples=60, deadline=None)
@given(drawn_profiles())
def test_with_room_for_all_nothing_that_takes_time_is_recomputed(profile: ModelProfile) -> None:
    step = Step(profile)
    trade_off = TradeOff(step)
    start = trade_off.add(set(step.plannable))
    assert polished(trade_off, start, 2**60, most_tries=500).added_seconds == 0.0


@settings(max_examples=60, deadline=None)
@given(drawn_profiles(), st.integers(0, 5))
def test_no_more_is_tried_than_allowed(profile: ModelProfile, most_tries: int) -> None:
    step = Step(profile)
    trade_off = CountingTradeOff(step)
    start = trade_off.add(set(step.plannable))
    trade_off.num_added = 0
    polished(trade_off, start, 2**60, most_tries)
    assert trade_off.num_added <= most_tries


class CountingTradeOff(TradeOff):
    num_added = 0

    def add(self, wanted):  # type: ignore[no-untyped-def]
        self.num_added += 1
        return super().add(wanted)
