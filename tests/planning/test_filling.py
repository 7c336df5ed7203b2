"""Memory that plans leave unused: found where it is, and filled with what is dear to run again."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.planning import model_families
from tests.planning.drawn_profiles import drawn_profiles

from memfit.graph.model_profile import ModelProfile
from memfit.planning import search
from memfit.planning.filling import fill, stuffed
from memfit.planning.simulator import absences, judged, ops_memory_bytes, simulated
from memfit.planning.step import Step
from memfit.planning.trade_off import Candidate, TradeOff


@settings(max_examples=120, deadline=None)
@given(drawn_profiles(), st.data())
def test_where_nothing_is_absent_a_plan_has_all_that_the_plain_step_has(
    profile: ModelProfile, data: st.DataObject
) -> None:
    step = Step(profile)
    recomputed = step.recomputed_of({value for value in step.plannable if data.draw(st.booleans())})
    simulation = simulated(step, recomputed)
    # What nobody asks for again is absent for good.
    assume(len(simulation.replayed_ops) == len({step.value_op[value] for value in recomputed}))
    memory_bytes, absences_of = absences(step, recomputed)
    assert memory_bytes.max(initial=step.resident_bytes) == simulation.peak_bytes
    assert set(absences_of) == set(simulation.replayed_ops)
    with_all = memory_bytes.copy()
    for begin, end, num_bytes in (absence for of_op in absences_of.values() for absence in of_op):
        assert begin < end
        with_all[begin:end] += num_bytes
    # Among the positions of ops and replays, the ops' own.
    at_ops = np.setdiff1d(np.arange(len(memory_bytes)), positions_of_runs(simulation.replayed_ops, step, recomputed))
    assert np.array_equal(memory_bytes[at_ops], ops_memory_bytes(step, recomputed))
    assert np.all(with_all[at_ops] >= ops_memory_bytes(step, frozenset()))


def positions_of_runs(replayed_ops: tuple[int, ...], step: Step, recomputed: set[int]) -> list[int]:
    """Return where the replays are: what they bring back is absent until there."""
    _, absences_of = absences(step, recomputed)
    ends = {op: {absence.end for absence in absences_of[op]} for op in replayed_ops}
    assume(all(len(positions) == 1 for positions in ends.values()))
    return [position for op in replayed_ops for position in ends[op]]


@settings(max_examples=120, deadline=None)
@given(drawn_profiles(), st.data())
def test_a_stuffed_plan_saves_more_within_the_budget_and_is_no_slower(
    profile: ModelProfile, data: st.DataObject
) -> None:
    step = Step(profile)
    trade_off = TradeOff(step)
    start = trade_off.add({value for value in step.plannable if data.draw(st.booleans())})
    budget_bytes = start.peak_bytes + data.draw(st.integers(0, 64))
    better = stuffed(trade_off, start, budget_bytes)
    assert better.peak_bytes <= budget_bytes
    assert better.recomputed <= start.recomputed
    assert better.added_seconds < start.added_seconds or better == start
    assert Candidate(better.recomputed, *judged(step, better.recomputed)) == better


@settings(max_examples=60, deadline=None)
@given(drawn_profiles())
def test_with_room_for_all_nothing_that_takes_time_is_recomputed(profile: ModelProfile) -> None:
    step = Step(profile)
    trade_off = TradeOff(step)
    start = trade_off.add(set(step.plannable))
    assert stuffed(trade_off, start, 2**60).added_seconds == 0.0


# 0.20 and 0.82 when this was written; a ResNet's values are so large that there is little between its plans.
@pytest.mark.parametrize(("family", "share"), [("moe", 0.3), ("resnet", 0.9)])
def test_budgets_between_plans_get_faster_ones(family: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(getattr(model_families, family)())
    filled = search.explored(step).frontier
    monkeypatch.setattr(search, "fill", lambda trade_off: None)
    without = search.explored(step).frontier
    high, low = without[0].peak_bytes, without[-1].peak_bytes
    for budget_bytes in (low + (high - low) * number // 50 for number in range(51)):
        assert seconds_at(filled, budget_bytes) <= seconds_at(without, budget_bytes)
    assert lost_in_steps(filled) < share * lost_in_steps(without)


def seconds_at(frontier: tuple[Candidate, ...], budget_bytes: int) -> float:
    return next(plan.added_seconds for plan in frontier if plan.peak_bytes <= budget_bytes)


def lost_in_steps(frontier: tuple[Candidate, ...]) -> float:
    """Return what budgets between two plans lose by getting the smaller one."""
    return sum((a.peak_bytes - b.peak_bytes) * (b.added_seconds - a.added_seconds) for a, b in pairwise(frontier))


def test_a_step_that_is_too_large_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trade_off = TradeOff(Step(model_families.resnet()))
    trade_off.add_all([set(), trade_off.may_be_recomputed])
    before = trade_off.frontier()
    monkeypatch.setattr("memfit.planning.filling._EFFORT_OPS", 100)
    monkeypatch.setattr("memfit.planning.filling._STUFFING_OPS", 100)
    fill(trade_off)
    assert trade_off.frontier() == before
