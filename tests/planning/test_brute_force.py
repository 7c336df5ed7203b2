"""The planner against every choice there is, on steps small enough for that."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from tests.planning.brute_force import all_judgements
from tests.planning.drawn_profiles import drawn_profiles

from memfit.errors import InfeasibleBudgetError
from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import Decision
from memfit.planning.bounds.lower_bound import LowerBound
from memfit.planning.planner import frontier, plan
from memfit.planning.simulate.simulator import judged, simulate
from memfit.planning.step import Step


@settings(max_examples=30, deadline=None)
@given(drawn_profiles(max_forward_ops=6))
def test_plans_for_every_budget_equal_brute_force(profile: ModelProfile) -> None:
    judgements = all_judgements(profile)
    smallest = min(judgement.peak_bytes for judgement in judgements)
    plain_peak = judged(Step(profile), set()).peak_bytes
    for budget in sorted({judgement.peak_bytes for judgement in judgements}):
        least_seconds = min(j.recompute_seconds for j in judgements if j.peak_bytes <= budget)
        least_peak = min(j.peak_bytes for j in judgements if j.recompute_seconds == least_seconds)
        made = plan(profile, budget=budget)
        if budget >= plain_peak:
            # Nothing needs to be done, so nothing is, even where some of it would cost no time.
            least_peak = plain_peak
        assert made.predicted_overhead == least_seconds / profile.step_seconds
        assert made.predicted_peak_bytes == least_peak
        assert made.optimality_gap == 0
        recomputed = {i for i, v in enumerate(profile.values) if made.decisions.get(v.name) is Decision.RECOMPUTE}
        simulation = simulate(profile, recomputed)
        assert (simulation.peak_bytes, simulation.recompute_seconds) == (least_peak, least_seconds)
        assert made.recompute_flops == simulation.recompute_flops
    if smallest > 0:
        with pytest.raises(InfeasibleBudgetError) as raised:
            plan(profile, budget=smallest - 1)
        assert raised.value.minimum_bytes == smallest
        assert re.search(r"no plan that replays each op at most once needs less[);]", str(raised.value))


@settings(max_examples=25, deadline=None)
@given(drawn_profiles(max_forward_ops=6))
def test_the_lower_bound_is_never_above_the_best_plan(profile: ModelProfile) -> None:
    step = Step(profile)
    bound = LowerBound(step, step.may_be_recomputed)
    judgements = all_judgements(profile)
    for budget in sorted({judgement.peak_bytes for judgement in judgements}):
        least_seconds = min(j.recompute_seconds for j in judgements if j.peak_bytes <= budget)
        for time in range(step.num_ops):
            assert bound.seconds(budget, [time]) <= least_seconds + 1e-9  # Sums of floats, not of whole units.


@settings(max_examples=25, deadline=None)
@given(drawn_profiles(max_forward_ops=6))
def test_frontier_is_the_brute_force_frontier(profile: ModelProfile) -> None:
    judgements = all_judgements(profile)
    best = [
        j
        for j in set(judgements)
        if not any(
            o != j and o.peak_bytes <= j.peak_bytes and o.recompute_seconds <= j.recompute_seconds for o in judgements
        )
    ]
    expected = sorted(((j.peak_bytes, j.recompute_seconds / profile.step_seconds) for j in best), reverse=True)
    points = frontier(profile, points=expected[0][0] - expected[-1][0] + 1)
    assert [(point.peak_bytes, point.overhead) for point in points] == expected
