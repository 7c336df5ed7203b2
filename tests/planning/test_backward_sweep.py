"""Sweeps against every choice there is: nothing false is proven, and nearly always the best is found."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.planning.drawn_profiles import drawn_profiles
from tests.planning.model_families import chain, unet

import memfit.planning.dp.dynamic_program as backward_sweep
import memfit.planning.search as search
from memfit.graph.model_profile import ModelProfile
from memfit.planning.candidates.enumeration import all_choices, values_that_matter
from memfit.planning.candidates.trade_off import Candidate, TradeOff
from memfit.planning.dp.dynamic_program import Guide, swept
from memfit.planning.dp.state_graph import StateGraph, state_graph
from memfit.planning.dp.sweep_timeline import SweepTimeline
from memfit.planning.dp.time_prices import TimePrices
from memfit.planning.search import explored
from memfit.planning.simulate.simulator import judged
from memfit.planning.step import Step

ENDLESS = 2**45


def exact_frontier(step: Step, most_values: int) -> list[Candidate]:
    trade_off = TradeOff(step)
    matter = values_that_matter(step, trade_off.may_be_recomputed)
    assume(2 <= len(matter) <= most_values)
    trade_off.add(set())
    trade_off.add_all(all_choices(step, matter))
    return trade_off.frontier()


def holds_what_never_runs(step: Step) -> bool:
    """Whether a value is saved that is never read: then a recipe may be kept that never runs, and sweeps forget it."""
    values = range(len(step.value_op))
    return any(step.saves_of_value[v] and step.read_rank_of_value[v] >= len(step.read_times) for v in values)


def graph_of(step: Step, timeline: SweepTimeline) -> StateGraph | None:
    assume(timeline.droppable)
    return state_graph(timeline, list(range(step.num_ops)), most_states=100_000)


@pytest.fixture(autouse=True, scope="module")
def rows_are_compared_however_few_they_are() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward_sweep, "_MOST_NOT_COMPARED", 0)
        yield


@settings(max_examples=150, deadline=None)
@given(drawn_profiles())
def test_a_sweep_finds_the_frontier_of_all_choices(profile: ModelProfile) -> None:
    step = Step(profile)
    exact = exact_frontier(step, most_values=9)
    assume(not holds_what_never_runs(step))
    timeline = SweepTimeline(step, step.may_be_recomputed)
    result = swept(timeline, ENDLESS, by_seconds=True, most_rows=10_000)
    assert result.is_complete
    found = [(plan.peak_bytes, plan.seconds) for plan in reversed(result.found)]
    assert found == [(best.peak_bytes, best.recompute_seconds) for best in exact]
    for plan in result.found:
        judgement = judged(step, step.recomputed_of(plan.dropped))
        assert (judgement.peak_bytes, judgement.recompute_seconds) == (plan.peak_bytes, plan.seconds)


@settings(max_examples=80, deadline=None)
@given(drawn_profiles(), st.integers(1, 30))
def test_what_few_rows_prove_holds_for_every_plan(profile: ModelProfile, most_rows: int) -> None:
    step = Step(profile)
    exact = exact_frontier(step, most_values=9)
    timeline = SweepTimeline(step, step.may_be_recomputed)
    least = swept(timeline, ENDLESS, by_seconds=False, most_rows=most_rows).least
    assert least <= exact[-1].peak_bytes
    for best in exact:
        assert swept(timeline, best.peak_bytes, by_seconds=True, most_rows=most_rows).least <= best.recompute_seconds


@settings(max_examples=120, deadline=None)
@given(drawn_profiles(), st.integers(1, 12))
def test_rows_taken_together_prove_nothing_that_is_false(profile: ModelProfile, most_rows: int) -> None:
    step = Step(profile)
    exact = exact_frontier(step, most_values=9)
    timeline = SweepTimeline(step, step.may_be_recomputed)
    for limit_bytes in (exact[-1].peak_bytes, exact[0].peak_bytes, ENDLESS):
        result = swept(timeline, limit_bytes, by_seconds=False, most_rows=most_rows, is_relaxed=True)
        assert result.least <= exact[-1].peak_bytes
    for best in exact:
        result = swept(timeline, best.peak_bytes, by_seconds=True, most_rows=most_rows, is_relaxed=True)
        assert result.least <= best.recompute_seconds


@settings(max_examples=80, deadline=None)
@given(drawn_profiles(), st.data())
def test_what_a_part_of_the_step_proves_holds_for_every_plan(profile: ModelProfile, data: st.DataObject) -> None:
    step = Step(profile)
    exact = exact_frontier(step, most_values=9)
    before_op = data.draw(st.integers(1, step.close_time + 1))
    part = SweepTimeline(step, step.may_be_recomputed, before_op=before_op)
    assert swept(part, ENDLESS, by_seconds=False, most_rows=10_000).least <= exact[-1].peak_bytes


@settings(max_examples=80, deadline=None)
@given(drawn_profiles(), st.data())
def test_no_plan_is_cheaper_than_the_cheapest_path(profile: ModelProfile, data: st.DataObject) -> None:
    step = Step(profile)
    exact = exact_frontier(step, most_values=9)
    graph = graph_of(step, SweepTimeline(step, step.may_be_recomputed))
    assert graph is not None
    prices = np.array(data.draw(st.lists(st.integers(0, 3), min_size=step.num_ops, max_size=step.num_ops)), dtype=float)
    cheapest = graph.cheapest(prices)
    for best in exact:
        # At no time is more live than at the peak.
        assert cheapest.cost <= best.recompute_seconds + prices.sum() * best.peak_bytes + 1e-6
    assert cheapest.cost == pytest.approx(cheapest.seconds + prices @ cheapest.memory_bytes)


@settings(max_examples=60, deadline=None)
@given(drawn_profiles())
def test_prices_prove_nothing_that_is_false_and_guide_to_the_best(profile: ModelProfile) -> None:
    step = Step(profile)
    exact = exact_frontier(step, most_values=9)
    timeline = SweepTimeline(step, step.may_be_recomputed)
    graph = graph_of(step, timeline)
    assert graph is not None
    prices = TimePrices(step, graph)
    peak_prices, least_peak = prices.for_peak(30)
    assert least_peak <= exact[-1].peak_bytes
    for best in exact:
        budget_prices, line = prices.for_seconds(best.peak_bytes, 30)
        for other in exact:
            assert line.seconds(other.peak_bytes) <= other.recompute_seconds
        guides = [Guide(budget_prices, 1.0), Guide(peak_prices, 0.0)]
        result = swept(timeline, best.peak_bytes, by_seconds=True, most_rows=10_000, graph=graph, guides=guides)
        assert result.is_complete
        assert result.least <= best.recompute_seconds
        if not holds_what_never_runs(step):
            assert result.found[-1].seconds == best.recompute_seconds


# Few steps have just so many values; the others are cheap to draw. Trying all choices takes seconds.
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(drawn_profiles(max_forward_ops=16, max_backward_ops=10))
def test_what_is_called_exact_is_so_beyond_what_is_enumerated(profile: ModelProfile) -> None:
    step = Step(profile)
    matter = values_that_matter(step, step.may_be_recomputed)
    assume(len(matter) == 15)
    exact = exact_frontier(step, most_values=15)
    exploration = explored(step)
    assert exploration.proofs.least_peak_bytes <= exact[-1].peak_bytes
    for best in exact:
        assert exploration.proofs.seconds(best.peak_bytes) <= best.recompute_seconds
    if exploration.is_exact:
        found = [(plan.peak_bytes, plan.recompute_seconds) for plan in exploration.frontier]
        assert found == [(best.peak_bytes, best.recompute_seconds) for best in exact]
        assert exploration.proofs.least_peak_bytes == exact[-1].peak_bytes


@settings(max_examples=40, deadline=None)
@given(drawn_profiles())
def test_without_enumeration_small_steps_are_planned_exactly_too(profile: ModelProfile) -> None:
    step = Step(profile)
    exact = exact_frontier(step, most_values=10)
    assume(not holds_what_never_runs(step))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "MOST_ENUMERATED_VALUES", 0)
        exploration = explored(step)
    assert exploration.is_exact
    found = [(plan.peak_bytes, plan.recompute_seconds) for plan in exploration.frontier]
    assert found == [(best.peak_bytes, best.recompute_seconds) for best in exact]


def test_a_chain_of_layers_is_swept_down_to_the_square_root_of_twice_its_length() -> None:
    # With as many layers as 1 + 2 + … + n, n are held or replayed at a time, and one is in the making.
    num_layers = 36
    step = Step(chain(num_layers, num_bytes=1))
    everything_but_layers = judged(step, set()).peak_bytes - num_layers
    result = swept(SweepTimeline(step, step.may_be_recomputed), ENDLESS, by_seconds=False, most_rows=1_000)
    assert result.is_complete
    assert result.found[0].peak_bytes - everything_but_layers <= 1 + math.isqrt(2 * num_layers)


def test_two_explorations_of_one_step_find_the_same() -> None:
    first, second = (explored(Step(unet(depth=3))) for _ in range(2))
    assert first.frontier == second.frontier
    assert first.proofs.lines == second.proofs.lines
    assert first.proofs.floors == second.proofs.floors
    assert first.proofs.least_peak_bytes == second.proofs.least_peak_bytes
