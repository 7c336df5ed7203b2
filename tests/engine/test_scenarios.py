"""Accumulation, retained graphs, double backward, evaluation in between, and other uses, bit for bit as plain."""

from __future__ import annotations

import pytest
from tests.engine.plans import LAYER_PLANS, VALUE_PLANS, PlanFor
from tests.engine.scenarios import SCENARIOS, Scenario, assert_same_under
from tests.engine.zoo import BY_NAME

# Dropout; batch norm and in-place ReLUs; routing by data with counters; copies of weights in low precision; float64.
EXAMPLES = ("gpt", "resnet", "mixture-of-experts", "gpt-autocast-inside", "smooth-fp64")


@pytest.mark.parametrize("plan_for", [LAYER_PLANS[0], VALUE_PLANS[0]], ids=lambda plan_for: plan_for.__name__)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("name", EXAMPLES)
def test_scenario_is_that_of_the_plain_model(name: str, scenario: Scenario, plan_for: PlanFor) -> None:
    assert_same_under(BY_NAME[name], plan_for, scenario)
