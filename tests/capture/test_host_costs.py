"""What the engine costs on the host: typical costs, scaled to a real step."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from tests.engine.plans import every_value, profile_of
from tests.engine.zoo import BY_NAME

from memfit.calibration.host_costs import TYPICAL_ON_CPU, TYPICAL_SECONDS, with_fitted_host_costs, with_host_costs
from memfit.calibration.trial_plans import plan_of_all_that_replays, plan_of_every_second_that_replays
from memfit.capture.real_step import capture_real_step
from memfit.capture.state.kept_state import KeptState
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.graph.model_profile import HostCosts, Link
from memfit.graph.plan import Decision, Plan
from memfit.planning.simulate.simulator import simulated
from memfit.planning.step import Step
from memfit.runtime.engine.native_tape import engine_name

GPT = BY_NAME["gpt"]
COSTS = HostCosts(
    forward=1.0, backward=2.0, recorded_op=0.4, dropped_op=0.3, module_entry=0.2, hooked_save=0.1, replayed_op=0.5
)


@pytest.mark.parametrize(("factor", "fitted_factor"), [(2.0, 2.0), (0.01, 0.2), (100.0, 5.0)])
def test_costs_agree_with_the_step_that_was_measured(factor: float, fitted_factor: float) -> None:
    link = Link(1e9, 1e9, 1e-6, 2**30, host_seconds=3.0)
    profile = replace(profile_of(GPT), host=COSTS, link=link)
    plan = every_value(GPT)
    step = Step(profile)
    recomputed = {index for index in step.plannable if plan.decisions[profile.values[index].name] is Decision.RECOMPUTE}
    expected = step.recording.cost_of(recomputed, len(simulated(step, recomputed).replayed_ops))
    assert expected.forward > 0
    assert expected.backward > 0
    fitted_profile = with_fitted_host_costs(profile, plan, factor * expected.forward, factor * expected.backward)
    fitted = fitted_profile.host
    assert fitted is not None
    assert fitted_profile.link == replace(link, host_seconds=3.0 * max(fitted_factor, 1.0))
    assert (fitted.forward, fitted.backward) == (COSTS.forward, COSTS.backward)
    assert astuple(fitted)[2:7] == pytest.approx([fitted_factor * cost for cost in astuple(COSTS)[2:7]])


def test_costs_are_fitted_to_a_step_that_drops_every_second_value() -> None:
    """A step that drops everything gives too low costs: the engine stays in the host's caches."""
    profile = profile_of(GPT)

    def ops_dropped(plan: Plan) -> list[str]:
        return [name for name, decision in plan.decisions.items() if decision is Decision.RECOMPUTE]

    every_one, every_second = map(
        ops_dropped, (plan_of_all_that_replays(profile), plan_of_every_second_that_replays(profile))
    )
    # What is written over something that is kept is kept, too.
    assert set(every_second) <= set(every_one[::2])
    assert len(every_second) > 0.4 * len(every_one)


def test_host_costs_have_typical_proportions_and_the_scale_of_whole_steps() -> None:
    model, batch, loss = GPT.build()
    step = TrainingStep(model, StepArguments(batch, loss))
    state = KeptState(step)
    captured = capture_real_step(step, state)
    on_cpu = replace(captured.profile, host=TYPICAL_ON_CPU[engine_name()])
    assert with_host_costs(captured.profile, captured, step, state) == on_cpu
    launching = HostCosts(1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    host = with_host_costs(replace(captured.profile, host=launching), captured, step, state).host
    assert host is not None
    assert 0 < host.forward < 1.0
    assert 0 < host.backward < 2.0
    typical = TYPICAL_SECONDS[engine_name()]
    ratios = [getattr(host, name) / typical[name] for name in ("recorded_op", "dropped_op", "module_entry")]
    assert ratios == pytest.approx([ratios[0]] * 3)
    assert host.replayed_op > 0
