"""``verify``: what it measures, what it sees, and that it leaves no trace."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tests.engine.plans import unaccounted_bytes
from tests.engine.zoo.gpt import gpt
from tests.verification.odd_models import Chain, DoublesUnderAPlan, NeedsAPlan, NeverTheSame

import memfit
from memfit.runtime.applying.forward_wrapping import is_wrapped
from memfit.verification.verifying import verify


def planned(model: torch.nn.Module, batch: object, **options: object) -> memfit.Plan:
    """Return the plan that recomputes every block of the model."""
    return memfit.plan(memfit.profile(model, batch, **options), strategy=memfit.Full())


def test_a_gpt_with_dropout_has_equal_gradients_and_the_predicted_peak() -> None:
    model, batch, loss = gpt()
    profile = memfit.profile(model, batch, loss=loss)
    plan = memfit.plan(profile, strategy=memfit.Full())
    verification = verify(model, plan, batch, loss=loss)
    assert verification.gradients_equal is True
    assert verification.max_gradient_error == 0.0
    assert verification.differing_parameters == ()
    assert verification.plain_reproducible is True
    assert verification.plain_peak_bytes == profile.peak_bytes
    # The numbers that autograd saves are predicted for the whole step.
    assert 0 <= plan.predicted_peak_bytes - verification.peak_bytes <= unaccounted_bytes(profile) == 24
    assert plan.predicted_peak_bytes < profile.peak_bytes
    assert verification.predicted_peak_bytes == plan.predicted_peak_bytes
    assert verification.budget_bytes is None
    assert verification.holds


def test_times_are_medians_between_their_quartiles_and_the_overhead_is_their_ratio() -> None:
    model, batch = Chain(), torch.randn(4, 8)
    verification = verify(model, planned(model, batch), batch)
    low, high = verification.step_quartiles_seconds
    assert 0 < low <= verification.step_seconds <= high
    assert verification.plain_step_seconds is not None
    assert verification.overhead == verification.step_seconds / verification.plain_step_seconds - 1
    assert verification.overhead_quartiles is not None
    assert verification.overhead_quartiles.low <= verification.overhead_quartiles.high
    assert 5 <= verification.num_rounds <= 25


def test_what_the_plan_takes_of_the_host_is_told() -> None:
    model, batch = Chain(), torch.randn(4, 8)
    plan = planned(model, batch)
    assert verify(model, plan, batch).host_bytes == 0
    assert verify(model, replace(plan, host_bytes=77), batch).host_bytes == 77


def test_everything_is_as_it_was_afterwards() -> None:
    model, batch, loss = gpt()
    plan = planned(model, batch, loss=loss)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    state, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    verify(model, plan, batch, loss=loss)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.tokens.weight.grad is None
    assert not any(is_wrapped(module) for module in model.modules())


def test_the_optimizer_counts_as_part_of_the_step_and_does_not_move() -> None:
    model, batch = Chain(), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    profile = memfit.profile(model, batch, optimizer=optimizer)
    plan = memfit.plan(profile, strategy=memfit.Full())
    weights = [parameter.clone() for parameter in model.parameters()]
    verification = verify(model, plan, batch, optimizer=optimizer)
    assert verification.plain_peak_bytes == profile.peak_bytes
    assert verification.peak_bytes == plan.predicted_peak_bytes
    assert verification.gradients_equal
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_a_plan_at_work_is_set_aside_and_stays_at_work() -> None:
    model, batch = Chain(), torch.randn(4, 8)
    profile = memfit.profile(model, batch)
    plan = memfit.plan(profile, strategy=memfit.Full())
    with memfit.apply(model, memfit.plan(profile, strategy=memfit.EveryNthLayer(2))):
        verification = verify(model, plan, batch)
        assert model.is_planned()
    assert not model.is_planned()
    assert verification.plain_peak_bytes == profile.peak_bytes
    assert verification.peak_bytes == plan.predicted_peak_bytes


def test_gradients_that_differ_are_named_with_their_error() -> None:
    model, batch = DoublesUnderAPlan(), torch.randn(4, 8)
    plan = planned(model, batch)
    verification = verify(model, plan, batch)
    assert verification.gradients_equal is False
    assert verification.max_gradient_error == 1.0
    assert verification.differing_parameters == tuple(name for name, _ in model.named_parameters())
    assert verification.plain_reproducible is True
    assert not verification.holds


def test_a_plain_step_that_differs_from_itself_is_not_held_against_the_plan() -> None:
    model, batch = NeverTheSame(), torch.randn(4, 8)
    verification = verify(model, planned(model, batch), batch)
    assert verification.gradients_equal is False
    assert verification.plain_reproducible is False
    assert verification.plain_gradient_error is not None
    assert verification.plain_gradient_error > 0
    assert verification.holds


def test_a_plain_step_that_differs_from_itself_by_more_than_rounding_proves_nothing() -> None:
    model, batch = NeverTheSame(growth=0.1), torch.randn(4, 8)
    verification = verify(model, planned(model, batch), batch)
    assert verification.max_gradient_error is not None
    assert verification.plain_gradient_error is not None
    # By its size alone the difference would pass for noise.
    assert verification.max_gradient_error < verification.plain_gradient_error
    assert verification.plain_differs
    assert not verification.gradients_hold
    assert not verification.holds


def test_a_batch_of_another_shape_is_warned_of_once() -> None:
    model = Chain()
    plan = planned(model, torch.randn(4, 8))
    with pytest.warns(UserWarning, match=r"planned for x float32\[4, 8\], got float32\[6, 8\]") as warned:
        verification = verify(model, plan, torch.randn(6, 8))
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert verification.gradients_equal


def test_where_only_the_planned_step_fits_the_device_it_is_measured_alone() -> None:
    model, batch = NeedsAPlan(), torch.randn(4, 8)
    plan = planned(model, batch)
    model.is_large = True
    verification = verify(model, plan, batch)
    assert verification.peak_bytes == plan.predicted_peak_bytes
    assert verification.plain_peak_bytes is verification.gradients_equal is verification.overhead is None
    assert verification.holds


def test_a_plan_of_another_model_is_refused_with_the_model_unchanged() -> None:
    model, batch = Chain(), torch.randn(4, 8)
    plan = planned(Chain(num_blocks=3), batch)
    with pytest.raises(memfit.InvalidParameterError, match="this plan is for another model"):
        verify(model, plan, batch)
    assert not model.is_planned()


@pytest.mark.parametrize("wrong", [None, {"decisions": {}}, "plan.json"])
def test_what_is_no_plan_is_refused(wrong: object) -> None:
    with pytest.raises(memfit.InvalidParameterError, match=r"plan is a Plan as memfit.plan\(\) returns it"):
        verify(Chain(), wrong, torch.randn(4, 8))
