"""Profiling runs real steps and leaves everything as it was: weights, state, batch, gradients, random generators."""

from __future__ import annotations

import pytest
import torch
from tests.engine.step_comparison import assert_same, leaves, look, trace_steps
from tests.engine.zoo import ZOO, Example

import memfit


@pytest.mark.parametrize("example", ZOO, ids=str)
def test_profile_leaves_everything_as_it_was(example: Example) -> None:
    model, batch, loss = example.build()
    # A gradient that was there before, as in the middle of an accumulation.
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = look("it", model, batch) | dict(leaves("weight", dict(model.state_dict())))
    with example.context():
        memfit.profile(model, batch, loss=loss)
    assert_same(before, look("it", model, batch) | dict(leaves("weight", dict(model.state_dict()))))
    # And what cannot be seen from outside: the steps that follow are those of a model never profiled.
    assert_same(
        trace_steps(example.build(), context=example.context),
        trace_steps((model, batch, loss), context=example.context),
    )
