"""The smallest peak of steps that are too large to try everything: found, proven, and looked for when asked for."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from tests.planning.drawn_profiles import drawn_profiles
from tests.planning.model_families import gpt, resnet
from tests.planning.test_backward_sweep import exact_frontier, holds_what_never_runs

import memfit.planning.bounds.refinement as refinement
import memfit.planning.search as search
from memfit.errors import InfeasibleBudgetError
from memfit.graph.model_profile import ModelProfile
from memfit.planning.bounds.proofs import Proofs
from memfit.planning.candidates.trade_off import TradeOff
from memfit.planning.dp.least_peak import least_peak
from memfit.planning.dp.sweep_search import Sweeps
from memfit.planning.planner import frontier, plan
from memfit.planning.search import Exploration, with_least_peak
from memfit.planning.step import Step


@settings(max_examples=60, deadline=None)
@given(drawn_profiles())
def test_the_least_peak_is_that_of_all_choices(profile: ModelProfile) -> None:
    step = Step(profile)
    exact = exact_frontier(step, most_values=9)
    trade_off, sweeps = TradeOff(step), Sweeps(step, step.may_be_recomputed)
    smallest, least_bytes = least_peak(trade_off, sweeps, trade_off.add(set()), 0, effort=10_000_000)
    assert least_bytes <= exact[-1].peak_bytes <= smallest.peak_bytes
    if sweeps.is_possible and not holds_what_never_runs(step):
        assert least_bytes == exact[-1].peak_bytes == smallest.peak_bytes


@pytest.mark.parametrize(("profile", "least_bytes"), [(gpt(), 12_252_094_464), (resnet(), 2_743_448_320)])
def test_the_smallest_peak_of_repeated_blocks_is_proven(profile: ModelProfile, least_bytes: int) -> None:
    assert frontier(profile, points=2)[-1].peak_bytes == least_bytes
    with pytest.raises(InfeasibleBudgetError, match="no plan can have less\\)") as raised:
        plan(profile, budget=least_bytes - 1)
    assert raised.value.minimum_bytes == least_bytes
    assert plan(profile, budget=least_bytes).predicted_peak_bytes == least_bytes


def test_what_is_below_the_frontier_is_looked_for_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinement, "_EFFORT_FOR_LEAST_PEAK", 0)
    monkeypatch.setattr(refinement, "_EFFORT_FOR_LEAST_PEAK_OF_FEW", 0)
    profile = resnet()
    fastest, smallest = frontier(profile, points=2)
    with pytest.raises(InfeasibleBudgetError, match="no plan can have less\\)") as raised:
        plan(profile, budget=1)
    minimum_bytes = raised.value.minimum_bytes
    assert minimum_bytes < smallest.peak_bytes
    made = plan(profile, budget=minimum_bytes)
    assert made.predicted_peak_bytes == minimum_bytes
    assert frontier(profile, points=2)[-1].peak_bytes == minimum_bytes
    budgets = np.linspace(minimum_bytes, fastest.peak_bytes, 12, dtype=int).tolist()
    plans = [plan(profile, budget=budget) for budget in sorted([*budgets, smallest.peak_bytes])]
    for tight, loose in pairwise(plans):
        assert tight.predicted_overhead >= loose.predicted_overhead
        assert tight.predicted_peak_bytes <= loose.predicted_peak_bytes


@settings(max_examples=60, deadline=None)
@given(drawn_profiles())
def test_what_is_found_below_beats_what_is_larger_and_slower(profile: ModelProfile) -> None:
    step = Step(profile)
    exact = exact_frontier(step, most_values=9)
    some = TradeOff(step)
    some.add_all([set(), step.may_be_recomputed])
    poor = Exploration(tuple(some.frontier()), some.may_be_recomputed, False, False, Proofs())
    found = with_least_peak(step, poor).frontier
    for fast, small in pairwise(found):
        assert fast.added_seconds < small.added_seconds
        assert fast.peak_bytes > small.peak_bytes
    if Sweeps(step, step.may_be_recomputed).is_possible and not holds_what_never_runs(step):
        assert found[-1].peak_bytes == exact[-1].peak_bytes


def test_a_minimum_that_is_not_proven_is_told_with_what_no_plan_can_have_less_than(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refinement, "_EFFORT_FOR_LEAST_PEAK_OF_FEW", 0)
    for module in (refinement, search):
        monkeypatch.setattr(module, "_EFFORT_FOR_LEAST_PEAK", 0)
    profile = resnet()
    smallest = frontier(profile, points=2)[-1]
    with pytest.raises(InfeasibleBudgetError) as raised:
        plan(profile, budget=smallest.peak_bytes - 1)
    assert raised.value.minimum_bytes == smallest.peak_bytes
    proven = re.search(r"no plan can have less than (\d+)\)", str(raised.value))
    assert proven is not None
    assert 0 < int(proven[1]) < smallest.peak_bytes
