"""Plans that do not fit the model, and other mistakes: told before any training step runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memfit


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, num_blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch(width: int = 8) -> Tensor:
    return torch.ones(2, width)


@pytest.fixture
def profile() -> memfit.ModelProfile:
    return memfit.profile(Blocks(), batch())


def test_a_plan_with_modules_that_the_model_lacks_is_refused(profile: memfit.ModelProfile) -> None:
    plan = memfit.plan(profile, strategy=memfit.Full())
    with pytest.raises(memfit.InvalidParameterError, match=r"another model: Blocks has no module 'blocks\.2'"):
        memfit.apply(Blocks(num_blocks=2), plan)


def test_a_plan_for_other_parameter_shapes_is_refused(profile: memfit.ModelProfile) -> None:
    plan = memfit.plan(profile, strategy=memfit.Full())
    with pytest.raises(memfit.InvalidParameterError, match="parameter shapes of this Blocks differ"):
        memfit.apply(Blocks(width=16), plan)


def test_a_plan_fits_another_instance_of_the_same_model(profile: memfit.ModelProfile) -> None:
    model = Blocks()
    with memfit.apply(model, memfit.plan(profile, strategy=memfit.Full())) as applied:
        model(batch()).backward()
    assert applied.model is model


def test_applying_twice_is_refused(profile: memfit.ModelProfile) -> None:
    model, plan = Blocks(), memfit.plan(profile, strategy=memfit.Full())
    applied = memfit.apply(model, plan)
    with pytest.raises(memfit.InvalidParameterError, match=r"this Blocks .or a part of it. already has a plan"):
        memfit.apply(model, plan)
    with pytest.raises(memfit.InvalidParameterError, match=r"this Block .or a part of it. already has a plan"):
        memfit.apply(model.blocks[1], plan)
    applied.remove()
    memfit.apply(model, plan).remove()


def test_profiling_a_planned_model_measures_the_plain_step_and_leaves_the_plan(profile: memfit.ModelProfile) -> None:
    model = Blocks()
    with memfit.apply(model, memfit.plan(profile, strategy=memfit.Full())) as applied:
        forward = vars(model.blocks[0])["forward"]
        assert memfit.profile(model, batch()).peak_bytes == profile.peak_bytes
        assert vars(model.blocks[0])["forward"] is forward
        assert applied.is_applied


def test_remove_takes_off_every_plan_and_nothing_to_remove_is_no_error(profile: memfit.ModelProfile) -> None:
    model = Blocks()
    memfit.remove(model)
    applied = memfit.apply(model, memfit.plan(profile, strategy=memfit.Full()))
    memfit.remove(nn.Sequential(model))
    assert not applied.is_applied
    assert all("forward" not in vars(module) for module in model.modules())
    memfit.remove(model)
    with pytest.raises(memfit.InvalidParameterError, match=r"model is a torch\.nn\.Module, got int"):
        memfit.remove(3)


def test_removing_twice_is_an_error_that_says_so(profile: memfit.ModelProfile) -> None:
    applied = memfit.apply(Blocks(), memfit.plan(profile, strategy=memfit.Full()))
    applied.remove()
    with pytest.raises(memfit.MemfitError, match="already removed"):
        applied.remove()


def test_leaving_the_context_after_remove_is_no_second_removal(profile: memfit.ModelProfile) -> None:
    with memfit.apply(Blocks(), memfit.plan(profile, strategy=memfit.Full())) as applied:
        applied.remove()


def test_a_model_without_blocks_is_told_of_when_planning() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    profile = memfit.profile(model, batch())
    assert profile.layers == ()
    with pytest.warns(UserWarning, match="no repeated blocks"):
        plan = memfit.plan(profile, strategy=memfit.Full())
    with pytest.warns(UserWarning, match="nothing will change"):
        memfit.apply(model, plan).remove()


@pytest.mark.parametrize("selector", ["blocks.7", "blocks.*::aten.geluu", "", "blocks.0::"])
@pytest.mark.parametrize("argument", ["force_save", "force_recompute"])
def test_a_selector_that_matches_nothing_is_an_error(
    profile: memfit.ModelProfile, selector: str, argument: str
) -> None:
    with pytest.raises(memfit.InvalidParameterError, match="selector"):
        memfit.plan(profile, strategy=memfit.Full(), **{argument: [selector]})


def test_the_error_of_a_selector_names_the_nearest_values(profile: memfit.ModelProfile) -> None:
    with pytest.raises(memfit.InvalidParameterError, match=r"nearest are .*blocks\.0::aten\.gelu"):
        memfit.plan(profile, strategy=memfit.Full(), force_save=["blocks.0::aten.gello"])


def test_a_text_in_place_of_a_list_of_selectors_is_an_error(profile: memfit.ModelProfile) -> None:
    with pytest.raises(memfit.InvalidParameterError, match=r"write \['blocks\.0'\]"):
        memfit.plan(profile, strategy=memfit.Full(), force_save="blocks.0")


def test_a_value_that_both_selectors_name_is_saved(profile: memfit.ModelProfile) -> None:
    plan = memfit.plan(
        profile,
        strategy=memfit.NoCheckpointing(),
        force_recompute=["blocks.*::aten.gelu"],
        force_save=["blocks.1"],
    )
    dropped = [name for name, decision in plan.decisions.items() if decision is memfit.Decision.RECOMPUTE]
    assert dropped == ["blocks.0::aten.gelu#0", "blocks.2::aten.gelu#0"]


@pytest.mark.parametrize("given", [None, 3, "plan.json"])
def test_what_is_no_plan_and_no_model_is_refused(given: object) -> None:
    with pytest.raises(memfit.InvalidParameterError, match="plan is a Plan"):
        memfit.apply(Blocks(), given)
    with pytest.raises(memfit.InvalidParameterError, match=r"model is a torch\.nn\.Module"):
        memfit.profile(given, batch())
    with pytest.raises(memfit.InvalidParameterError, match="profile is a ModelProfile"):
        memfit.plan(given, strategy=memfit.Full())


def test_a_values_own_name_is_a_selector(profile: memfit.ModelProfile) -> None:
    plan = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["blocks.1::aten.gelu#0"])
    dropped = [name for name, decision in plan.decisions.items() if decision is memfit.Decision.RECOMPUTE]
    assert dropped == ["blocks.1::aten.gelu#0"]
