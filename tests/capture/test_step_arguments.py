"""Losses and optimizers that make no training step: refused with the reason, whichever way the step would run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.training_step import loss_of

MODES = pytest.mark.parametrize("mode", ["real", "fake"])


def batch() -> torch.Tensor:
    return torch.ones(4, 8)


@MODES
@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (3, r"loss is a function of the model's output that returns a scalar, .* or None; got 3 \(int\)"),
        (
            lambda output: torch.complex(output, output).sum(),
            r"the loss is a complex tensor of shape \(\); it must be ",
        ),
        (lambda output: output.detach().sum(), r"the loss is a tensor of shape \(\) that no parameter influences"),
        (lambda output: output, r"the loss is a tensor of shape \(4, 8\); it must be a tensor with one element"),
    ],
)
def test_what_is_no_loss_is_told(mode: Any, loss: Any, told: str) -> None:
    with pytest.raises(memfit.InvalidParameterError, match=told):
        memfit.profile(nn.Linear(8, 8), batch(), loss=loss, mode=mode)


def test_a_step_of_complex_numbers_with_a_real_loss_is_profiled() -> None:
    model = nn.Linear(8, 8, dtype=torch.complex64)
    assert memfit.profile(model, batch() + 0j, loss=lambda output: output.abs().mean()).peak_bytes > 0


@MODES
def test_a_frozen_model_is_told_from_a_loss_of_the_wrong_shape(mode: Any) -> None:
    model = nn.Linear(8, 8).requires_grad_(False)
    with pytest.raises(memfit.InvalidParameterError, match="nothing in the model's output requires gradients"):
        memfit.profile(model, batch(), mode=mode)


@MODES
@pytest.mark.parametrize("gradients_off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("loss", [None, torch.sum])
def test_gradients_that_are_switched_off_are_told(mode: Any, gradients_off: Any, loss: Any) -> None:
    model, rows = nn.Linear(8, 8), batch()
    with (
        gradients_off(),
        pytest.raises(memfit.InvalidParameterError, match=r"gradients are switched off.* outside of torch\.no_grad"),
    ):
        memfit.profile(model, rows, loss=loss, mode=mode)


def test_an_optimizer_that_needs_a_closure_is_refused_wherever_one_is_taken() -> None:
    model = nn.Linear(8, 8)
    plan = memfit.plan(memfit.profile(model, batch()), strategy=memfit.NoCheckpointing())
    told = r"LBFGS\.step\(\) needs a closure.* Leave optimizer out"
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(memfit.InvalidParameterError, match=told):
        memfit.profile(model, batch(), optimizer=optimizer)
    with pytest.raises(memfit.InvalidParameterError, match=told):
        memfit.verify(model, plan, batch(), optimizer=optimizer)
    with pytest.raises(memfit.InvalidParameterError, match=told):
        memfit.fit(model, batch(), budget="1GiB", optimizer=optimizer)


def test_verify_refuses_what_profile_refuses() -> None:
    model = nn.Linear(8, 8)
    plan = memfit.plan(memfit.profile(model, batch()), strategy=memfit.NoCheckpointing())
    with pytest.raises(memfit.InvalidParameterError, match="loss is a function of the model's output"):
        memfit.verify(model, plan, batch(), loss=3)
    with pytest.raises(memfit.InvalidParameterError, match=r"optimizer is a torch.optim.Optimizer or None, got str"):
        memfit.verify(model, plan, batch(), optimizer="adam")


@pytest.mark.parametrize("kind", [tuple, list, lambda entries: dict(enumerate(entries))], ids=["tuple", "list", "dict"])
def test_the_loss_is_the_mean_of_what_is_returned_and_not_of_what_lies_in_objects_beside_it(kind: Any) -> None:
    made = torch.ones(4, 8, requires_grad=True)
    cache = SimpleNamespace(keys=made * 100)
    output = kind([made * 2, torch.arange(4), made.sum() * 1.0, cache])
    assert loss_of(output, None).item() == (2 + 32) / 2
