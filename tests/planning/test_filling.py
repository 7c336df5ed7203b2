"""Where the frontier has holes, plans between get filled in."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.planning import model_families

from memfit.planning import search
from memfit.planning.candidates.filling import fill
from memfit.planning.candidates.trade_off import Candidate, TradeOff
from memfit.planning.step import Step


# 0.20 and 0.82 when this was written; a ResNet's values are so large that there is little between its plans.
@pytest.mark.parametrize(("family", "share"), [("moe", 0.3), ("resnet", 0.9)])
def test_budgets_between_plans_get_faster_ones(family: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(getattr(model_families, family)())
    filled = search.explored(step).frontier
    monkeypatch.setattr(search, "fill", lambda trade_off: None)
    monkeypatch.setattr(search, "_stuff", lambda trade_off, frontier: None)
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
    monkeypatch.setattr("memfit.planning.candidates.filling._EFFORT_OPS", 100)
    fill(trade_off)
    assert trade_off.frontier() == before
