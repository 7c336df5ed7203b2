"""What the engine's Python costs: measured in a short loop, then made to agree with a real step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from random import Random
from typing import Any

import pytest
from tests.engine.plans import every_value, profile_of
from tests.engine.zoo import BY_NAME

from memfit.capture.host_costs import measured_host_costs, seconds_added, with_fitted_host_costs
from memfit.graph.model_profile import HostCosts, Link
from memfit.graph.plan import Decision, Plan
from memfit.planning.planner import plan_of_all_that_replays, plan_of_every_second_that_replays
from memfit.planning.simulator import simulated
from memfit.planning.step import Step
from memfit.runtime.recorded_modules import Region

GPT = BY_NAME["gpt"]
COSTS = HostCosts(
    forward=1.0, backward=2.0, recorded_op=0.4, dropped_op=0.3, module_entry=0.2, hooked_save=0.1, replayed_op=0.5
)


def test_everything_that_the_engine_does_takes_some_time() -> None:
    costs = measured_host_costs(1.0, 2.0)
    assert (costs.forward, costs.backward) == (1.0, 2.0)
    # A tenth of a microsecond is less than an op needs to be heard, a millisecond more than all of it needs.
    for seconds in astuple(costs)[2:-2]:
        assert 0 <= seconds < 1e-3
    assert costs.recorded_op > 1e-7


def test_going_into_a_module_does_not_cost_what_a_forward_pass_does(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[float] = []

    class Dear:
        """A tape that takes ten seconds to begin, and one for each module."""

        report = None

        def __init__(self) -> None:
            spent.append(10.0)

        def begin(self, owner: object) -> None:
            pass

        def run(self, region: Region, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            spent.append(1.0)
            return forward(*args, **kwargs)

        def close(self, *, is_complete: bool = True) -> None:
            pass

    class Clock:
        """Tells what was spent, instead of the time."""

        @staticmethod
        def perf_counter() -> float:
            return sum(spent)

    monkeypatch.setattr("memfit.capture.host_costs.new_tape", Dear)
    monkeypatch.setattr("memfit.capture.host_costs.time", Clock)
    assert measured_host_costs(0.0, 0.0).module_entry == 1.0


def test_a_host_that_is_slow_for_moments_is_not_taken_for_what_the_engine_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock:
        """Of a host that is up to twice as slow for moments that last for a few rounds, and a little unsteady."""

        num_calls, now = 0, 0.0
        random = Random(0)
        slowness = 1.0

        @classmethod
        def spend(cls, seconds: float) -> None:
            cls.num_calls += 1
            if cls.num_calls % 50 == 0:
                cls.slowness = cls.random.choice((1.0, cls.random.uniform(1.0, 2.0)))
            cls.now += seconds * cls.slowness * cls.random.uniform(1.0, 1.05)

        @classmethod
        def perf_counter(cls) -> float:
            return cls.now

    monkeypatch.setattr("memfit.capture.host_costs.time", Clock)
    seconds = {"plain": 1.0, "recorded": 1.1, "dropped": 1.6}
    added = seconds_added({name: partial(Clock.spend, each) for name, each in seconds.items()})
    # A single difference is off by up to 0.08 for being unsteady alone.
    assert added("recorded", "plain") == pytest.approx(0.1, rel=0.2)
    assert added("dropped", "recorded") == pytest.approx(0.5, rel=0.2)


@pytest.mark.parametrize(("factor", "fitted_factor"), [(2.0, 2.0), (0.1, 1.0), (100.0, 5.0)])
def test_costs_agree_with_the_step_that_was_measured(factor: float, fitted_factor: float) -> None:
    link = Link(1e9, 1e9, 1e-6, 2**30, host_seconds=3.0)
    profile = replace(profile_of(GPT), host=COSTS, link=link)
    plan = every_value(GPT)
    step = Step(profile)
    recomputed = {index for index in step.plannable if plan.decisions[profile.values[index].name] is Decision.RECOMPUTE}
    expected = step.listeners.cost_of(recomputed, len(simulated(step, recomputed).replayed_ops))
    assert expected.forward > 0
    assert expected.backward > 0
    fitted_profile = with_fitted_host_costs(profile, plan, factor * expected.forward, factor * expected.backward)
    fitted = fitted_profile.host
    assert fitted is not None
    assert fitted_profile.link == replace(link, host_seconds=3.0 * fitted_factor)
    assert (fitted.forward, fitted.backward) == (COSTS.forward, COSTS.backward)
    assert astuple(fitted)[2:-2] == pytest.approx([fitted_factor * cost for cost in astuple(COSTS)[2:-2]])


def test_costs_are_told_by_a_step_that_drops_here_and_there() -> None:
    """By one that drops everything they would be told too low: the engine would stay in the host's caches."""
    profile = profile_of(GPT)

    def ops_dropped(plan: Plan) -> list[str]:
        return [name for name, decision in plan.decisions.items() if decision is Decision.RECOMPUTE]

    every_one, every_second = map(
        ops_dropped, (plan_of_all_that_replays(profile), plan_of_every_second_that_replays(profile))
    )
    # What is written over something that is kept is kept, too.
    assert set(every_second) <= set(every_one[::2])
    assert len(every_second) > 0.4 * len(every_one)
