"""Losses and optimizers that make no training step: refused with the reason, whichever way the step would run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.training_step import default_loss

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
    told = r"LBFGS\.step\(\) needs a closure.* Leave the optimizer out"
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(memfit.InvalidParameterError, match=told):
        memfit.profile(model, batch(), optimizer=optimizer)
    with pytest.raises(memfit.InvalidParameterError, match=told):
        memfit.verify(model, plan, batch(), optimizer=optimizer)
    with pytest.raises(memfit.InvalidParameterError, match=told):
        memfit.fit(model, batch(), budget="1GiB", optimizer=optimizer)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, r"batch is missing: pass what the model is called with"),
        ({"gradients": "old"}, r"gradients is 'fresh' or 'kept', got 'old'"),
        ({"loss": nn.CrossEntropyLoss()}, r"it takes \(input.*, target.*\); pass targets="),
        ({"loss": nn.functional.cross_entropy}, r"pass targets=\.\.\., and it is called as loss\(output, targets\)"),
        ({"loss": nn.CrossEntropyLoss}, r"loss is the class CrossEntropyLoss; pass an instance"),
        ({"loss": lambda: 0}, r"loss is called as loss\(output\), and it takes \(\); pass a function of the output"),
        ({"targets": 3}, r"targets= needs loss="),
        ({"targets": 3, "loss": lambda output: output}, r"it takes \(output\); leave out targets="),
        ({"step": 3}, r"step is a function that runs one training step, got 3"),
        ({"step": print, "loss": torch.sum}, r"step= is the whole training step, loss included"),
        ({"step": lambda: 0, "batch": 3}, r"step is called as step\(batch\); it takes \(\)"),
        ({"step": lambda batch: 0}, r"step is called as step\(\), because batch is None; it takes \(batch\)"),
    ],
)
def test_step_arguments_that_do_not_go_together_are_refused(arguments: dict[str, Any], told: str) -> None:
    if arguments and "step" not in arguments:
        arguments = {"batch": batch(), **arguments}
    with pytest.raises(memfit.InvalidParameterError, match=told):
        memfit.profile(nn.Linear(8, 8), **arguments)


def test_an_optimizer_with_a_learning_rate_scheduler_is_accepted() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.LinearLR(optimizer)
    assert memfit.profile(model, batch(), loss=torch.sum, optimizer=optimizer).peak_bytes > 0
    assert not optimizer.state


def test_targets_are_the_second_argument_of_the_loss() -> None:
    model, targets = nn.Linear(8, 8), torch.tensor([0, 1, 2, 3])
    profile = memfit.profile(model, batch(), loss=nn.CrossEntropyLoss(), targets=targets)
    assert "targets#0" in [value.name for value in profile.values]
    assert "aten.nll_loss_forward" in [op.op for op in profile.ops]


def test_the_mean_of_the_outputs_in_place_of_a_loss_is_warned_of_once() -> None:
    with pytest.warns(UserWarning, match="measured with the mean of the outputs as its loss") as warned:
        memfit.profile(nn.Linear(8, 8), batch())
    assert len(warned) == 1


def test_labels_without_a_loss_are_an_error() -> None:
    class Classifier(nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    with pytest.raises(memfit.InvalidParameterError, match="the batch has 'labels', and the output of Classifier has"):
        memfit.profile(Classifier(8, 8), {"x": batch(), "labels": torch.zeros(4)})


def test_verify_refuses_what_profile_refuses() -> None:
    model = nn.Linear(8, 8)
    plan = memfit.plan(memfit.profile(model, batch()), strategy=memfit.NoCheckpointing())
    with pytest.raises(memfit.InvalidParameterError, match="loss is a function of the model's output"):
        memfit.verify(model, plan, batch(), loss=3)
    with pytest.raises(memfit.InvalidParameterError, match=r"optimizer is a torch.optim.Optimizer, .* got str"):
        memfit.verify(model, plan, batch(), optimizer="adam")


@pytest.mark.parametrize("kind", [tuple, list, lambda entries: dict(enumerate(entries))], ids=["tuple", "list", "dict"])
def test_the_loss_is_the_mean_of_what_is_returned_and_not_of_what_lies_in_objects_beside_it(kind: Any) -> None:
    made = torch.ones(4, 8, requires_grad=True)
    cache = SimpleNamespace(keys=made * 100)
    output = kind([made * 2, torch.arange(4), made.sum() * 1.0, cache])
    loss, is_chosen = default_loss(output)
    assert loss.item() == (2 + 32) / 2
    assert is_chosen
