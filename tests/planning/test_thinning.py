"""Plans that launch less: on steps that wait for the host they are faster at the same memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planning import model_families

from memfit.graph.model_profile import HostCosts, ModelProfile, Phase
from memfit.planning import search
from memfit.planning.candidates.trade_off import TradeOff
from memfit.planning.simulate.simulator import simulated
from memfit.planning.step import Step


def launch_bound(profile: ModelProfile) -> ModelProfile:
    """Let the host need as long as the device, and about as long again for what the engine does with each op."""
    forward = sum(op.seconds for op in profile.ops if op.phase is Phase.FORWARD)
    backward = sum(op.seconds for op in profile.ops if op.phase is not Phase.FORWARD)
    one_op = forward / sum(op.phase is Phase.FORWARD for op in profile.ops)
    host = HostCosts(
        forward=forward,
        backward=backward,
        recorded_op=0.5 * one_op,
        dropped_op=0.3 * one_op,
        module_entry=0.3 * one_op,
        hooked_save=0.2 * one_op,
        replayed_op=one_op,
        runs_ahead=True,
    )
    return replace(profile, host=host, peak_bytes=simulated(Step(profile), frozenset()).peak_bytes)


def added_seconds(step: Step) -> list[float]:
    """Return what plans add for eight budgets from the largest peak to the smallest."""
    frontier = search.explored(step).frontier
    high, low = frontier[0].peak_bytes, frontier[-1].peak_bytes
    budgets = [high - (high - low) * number // 8 for number in range(1, 9)]
    return [next(plan.added_seconds for plan in frontier if plan.peak_bytes <= budget) for budget in budgets]


@pytest.mark.parametrize("family", ["resnet", "moe"])
def test_steps_that_wait_for_the_host_get_faster_plans(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(launch_bound(getattr(model_families, family)()))
    thinned = added_seconds(step)
    monkeypatch.setattr(search, "thin", lambda trade_off: None)
    without = added_seconds(step)
    # 0.88 and 0.86 when this was written.
    assert sum(thinned) < 0.92 * sum(without)


def test_values_that_do_not_matter_to_the_peak_are_saved() -> None:
    step = Step(launch_bound(model_families.resnet()))
    trade_off = TradeOff(step)
    everything = trade_off.add(trade_off.may_be_recomputed)
    trade_off.add(set())
    search.thin(trade_off)
    at_the_peak = [plan for plan in trade_off.frontier() if plan.peak_bytes <= everything.peak_bytes]
    assert at_the_peak[0].added_seconds < everything.added_seconds
    assert len(at_the_peak[0].recomputed) < len(everything.recomputed)


def test_a_step_that_is_too_large_for_a_round_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trade_off = TradeOff(Step(launch_bound(model_families.resnet())))
    trade_off.add(set())
    before = trade_off.frontier()
    monkeypatch.setattr("memfit.planning.candidates.thinning._EFFORT_OPS", 1000)
    search.thin(trade_off)
    assert trade_off.frontier() == before
