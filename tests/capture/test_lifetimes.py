"""How long the program itself needs a storage, and how long autograd does."""

from __future__ import annotations

import gc
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.capture.recording.plain_timeline import plain_timeline_bytes
from memfit.graph.model_profile import ModelProfile, Phase, RecordedValue


def value_named(profile: ModelProfile, name: str) -> RecordedValue:
    (value,) = (value for value in profile.values if value.name == name)
    return value


class Kept(nn.Module):
    """Holds on to what it computed, in ways that a program may."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.way = way

    def forward(self, x: Tensor) -> Any:
        hidden = self.linear(x)
        result = hidden.exp().sin()
        if self.way == "attribute":
            self.last = hidden
        if self.way == "view in output":
            return result, hidden[0].detach()
        if self.way == "cycle":
            loop: list[Any] = [hidden]
            loop.append(loop)
        return result


@pytest.mark.parametrize(("way", "outlives"), [("local", False), ("attribute", True), ("cycle", True)])
def test_what_the_program_holds_outlives_the_step(way: str, outlives: bool) -> None:
    profile = memfit.profile(Kept(way), torch.ones(2, 4), loss=lambda output: output[0].sum())
    hidden = value_named(profile, "linear::aten.addmm#0")
    last_forward = sum(op.phase is Phase.FORWARD for op in profile.ops) - 1
    assert hidden.dies_after is None if outlives else hidden.dies_after is not None and hidden.dies_after < last_forward
    assert gc.isenabled()


def test_the_output_is_needed_until_the_loss_is_computed() -> None:
    profile = memfit.profile(Kept("view in output"), torch.ones(2, 4), loss=lambda output: output[0].sum())
    last_forward = sum(op.phase is Phase.FORWARD for op in profile.ops) - 1
    assert value_named(profile, "linear::aten.addmm#0").dies_after == last_forward


class Force(nn.Module):
    """Differentiates inside forward, so that its saves are read there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.linear(x).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.square().sum()


class EachTimeLonger(nn.Module):
    """Takes another way at every call, by a count in a method, where nobody can put it back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._next_call = count().__next__

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self._next_call() % 5 + 1):
            x = self.linear(x).tanh()
        return x.sum()


@pytest.mark.parametrize("model", [Force(), EachTimeLonger()], ids=["force", "each-time-longer"])
def test_a_program_that_differentiates_or_changes_itself_has_lifetimes_as_any_other(model: nn.Module) -> None:
    profile = memfit.profile(model, torch.ones(2, 4))
    tanh = value_named(profile, "::aten.tanh#0")
    assert tanh.saves
    assert tanh.dies_after is not None
    assert tanh.dies_after < max(save.released_after for save in tanh.saves)
    assert max(plain_timeline_bytes(profile.ops, profile.values)) > 0


class SideOutput(nn.Module):
    """Returns something that the loss does not look at."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x).tanh(), self.side(x).tanh()


def test_a_save_that_backward_never_reads_says_so() -> None:
    profile = memfit.profile(SideOutput(), torch.ones(2, 4), loss=lambda output: output[0].sum())
    main, side = (value_named(profile, f"::aten.tanh#{call}") for call in range(2))
    (read,), (unread,) = main.saves, side.saves
    assert read.read_before < len(profile.ops)
    assert unread.read_before == len(profile.ops)
    # The output goes when the loss is computed, and with it its graph and the save.
    assert unread.released_after == sum(op.phase is Phase.FORWARD for op in profile.ops) - 1


def test_constants_made_on_the_way_are_born_where_they_are_met() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.tensor([2.0, 3.0])

    profile = memfit.profile(Scaled(4, 2), torch.ones(2, 4))
    constant = value_named(profile, "::memfit.unseen#0")
    assert (constant.num_bytes, constant.op_index) == (8, 1)
    assert max(plain_timeline_bytes(profile.ops, profile.values)) == profile.peak_bytes


def test_tensors_in_the_loss_are_there_before_the_step() -> None:
    targets = torch.zeros(2, 2)
    profile = memfit.profile(nn.Linear(4, 2), torch.ones(2, 4), loss=lambda output: (output - targets).square().sum())
    outside = {value.name: value.num_bytes for value in profile.values if value.op_index is None}
    assert outside.pop("outside#4") == 16
    assert outside == {"weight": 32, "bias": 8, "batch#0": 32}


@pytest.mark.parametrize("gradient", [None, torch.full((), 0.5)], ids=["none", "some"])
def test_parameters_of_the_loss_keep_their_gradients(gradient: Tensor | None) -> None:
    temperature = nn.Parameter(torch.tensor(2.0))
    temperature.grad = None if gradient is None else gradient.clone()
    memfit.profile(nn.Linear(4, 2), torch.ones(2, 4), loss=lambda output: (output / temperature).sum())
    assert temperature.grad is None if gradient is None else torch.equal(temperature.grad, gradient)


@pytest.mark.parametrize("ends", ["profile", "fit"])
def test_measuring_leaves_no_tensor_to_the_garbage_collector(ends: str) -> None:
    """Loops may run without it for long, and what it has not collected counts beside the training step."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(64, 16)
    gc.collect()
    gc.disable()
    try:
        num_before = num_tensors()
        if ends == "profile":
            memfit.profile(model, batch, loss=Tensor.sum, optimizer=optimizer)
        else:
            memfit.fit(model, batch, budget="29KiB", loss=Tensor.sum, optimizer=optimizer)
        assert num_tensors() == num_before
    finally:
        gc.enable()


def num_tensors() -> int:
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())
