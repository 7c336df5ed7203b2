"""Every model of the zoo under every plan: several training steps, bit for bit those of the plain model."""

from __future__ import annotations

from functools import cache

import pytest
from tests.engine.plans import PlanFor, applied, every_value, plans_for, profile_of
from tests.engine.step_comparison import Trace, assert_same, trace_steps
from tests.engine.zoo import BY_NAME, ZOO, Example

import memfit

CASES = [
    pytest.param(example, plan_for, id=f"{example}-{plan_for.__name__}")
    for example in ZOO
    for plan_for in plans_for(example)
]


@cache
def plain_trace(example: Example, training: bool) -> Trace:
    """Return what the plain model does; it does not depend on the plan."""
    return trace_steps(example.build(), training=training, context=example.context)


def planned_trace(example: Example, plan: memfit.Plan, training: bool) -> Trace:
    """Return what a fresh model does under ``plan``."""
    model, batch, loss = example.build()
    with applied(model, plan):
        return trace_steps((model, batch, loss), training=training, context=example.context)


@pytest.mark.parametrize(("example", "plan_for"), CASES)
def test_training_steps_are_those_of_the_plain_model(example: Example, plan_for: PlanFor) -> None:
    assert_same(plain_trace(example, True), planned_trace(example, plan_for(example), True))


@pytest.mark.parametrize("example", ZOO, ids=str)
def test_steps_in_eval_mode_are_those_of_the_plain_model(example: Example) -> None:
    # The plan was made in train mode and names ops that eval mode does not run: it must cost nothing but memory.
    assert_same(plain_trace(example, False), planned_trace(example, every_value(example), False))


@pytest.mark.parametrize("name", ["compiled-block", "compiled-block-wrapped"])
def test_compiled_block_is_called_compiled_in_every_step(name: str) -> None:
    # Both traces agree on the count, but would also agree if dynamo had given up on the plain model.
    assert plain_trace(BY_NAME[name], True)["step 2, attribute num_compiled_calls"] == 3


@pytest.mark.parametrize("example", [example for example in ZOO if example.has_blocks], ids=str)
def test_layers_are_found_where_blocks_repeat(example: Example) -> None:
    assert len(profile_of(example).layers) >= 2
