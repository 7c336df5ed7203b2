"""A plan knows the inputs it is for: larger ones have right gradients, and a warning that the peak does not hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.graph.inputs import Input, difference_in_words
from memfit.runtime.applying.model_inputs import inputs_of


class Masked(nn.Module):
    """Blocks over rows, which a mask may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, rows: Tensor, mask: Tensor | None = None, *, extra: Any = None) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows if mask is None else rows * mask


def plan_for(model: nn.Module, batch: Any) -> memfit.Plan:
    """Return the plan that recomputes every block."""
    return memfit.plan(memfit.profile(model, batch), strategy=memfit.Full())


def warned_by(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_profile_and_plan_carry_what_the_model_was_called_with(mode: Any) -> None:
    batch = {"rows": torch.randn(4, 8), "mask": torch.ones(4, 1, dtype=torch.bool), "extra": [torch.ones(())]}
    profile = memfit.profile(Masked(), batch, mode=mode)
    assert profile.inputs == (
        Input("rows", "float32", (4, 8)),
        Input("mask", "bool", (4, 1)),
        Input("extra.0", "float32", ()),
    )
    assert memfit.plan(profile, strategy=memfit.Full()).inputs == profile.inputs


def test_hooks_that_change_the_arguments_come_before() -> None:
    model = Masked()
    model.register_forward_pre_hook(lambda module, args: (args[0][:2],))
    profile = memfit.profile(model, torch.randn(4, 8))
    assert profile.inputs == (Input("rows", "float32", (2, 8)),)
    with memfit.apply(model, memfit.plan(profile, strategy=memfit.Full())):
        assert warned_by(lambda: model(torch.randn(4, 8))) == []


def test_each_new_maximum_warns_and_smaller_shapes_do_not() -> None:
    model = Masked()
    with memfit.apply(model, plan_for(model, torch.randn(4, 8))):
        assert warned_by(lambda: [model(torch.randn(size, 8)) for size in (4, 2, 4, 1)]) == []
        (first,) = warned_by(lambda: [model(torch.randn(size, 8)) for size in (4, 6, 5, 4, 6, 2)])
        assert first.startswith(
            "planned for rows float32[4, 8], got float32[6, 8]: gradients are right, the predicted peak does not hold"
        )
        (second,) = warned_by(lambda: [model(torch.randn(size, 8)) for size in (6, 9, 7)])
        assert second.startswith("planned for rows float32[6, 8], got float32[9, 8]")


def test_numbers_and_missing_tensors_are_within_the_plan_and_further_tensors_are_not() -> None:
    model, rows, mask = Masked(), torch.randn(4, 8), torch.ones(4, 1)
    with memfit.apply(model, plan_for(model, (rows, mask))):
        assert warned_by(lambda: [model(rows), model(rows, torch.ones(())), model(rows, extra=torch.ones(()))]) == []
        (told,) = warned_by(lambda: model(rows, extra={"more": [torch.ones(2)]}))
        assert told.startswith("planned for extra.more.0 absent, got float32[2]")
        # Of tensors inside of other arguments, too, each new maximum.
        (told,) = warned_by(lambda: [model(rows, extra={"more": [torch.ones(size)]}) for size in (1, 2, 3, 2)])
        assert told.startswith("planned for extra.more.0 float32[2], got float32[3]")


def test_wider_elements_are_larger_and_narrower_ones_are_not() -> None:
    model = Masked()
    with memfit.apply(model, plan_for(model, torch.randn(4, 8))):
        assert warned_by(lambda: model(torch.randn(4, 8), torch.ones(4, 1, dtype=torch.bool))) != []
        assert warned_by(lambda: model(torch.randn(4, 8), torch.ones(4, 1))) != []
        assert warned_by(lambda: model(torch.randn(4, 8), torch.ones(4, 1, dtype=torch.bfloat16))) == []


def test_several_passes_of_a_step_are_within_its_plan() -> None:
    model = Masked()

    def step(sizes: tuple[int, int]) -> None:
        (model(torch.randn(sizes[0], 8)).sum() + model(torch.randn(sizes[1], 8)).sum()).backward()

    profile = memfit.profile(model, (2, 6), step=step)
    assert profile.inputs == (Input("rows", "float32", (6, 8)),)
    with memfit.apply(model, memfit.plan(profile, strategy=memfit.Full())):
        assert warned_by(lambda: step((2, 6))) == []
        assert len(warned_by(lambda: step((7, 2)))) == 1


def test_a_budget_that_changes_nothing_is_broken_by_larger_inputs_with_a_warning() -> None:
    model, rows = Masked(), torch.randn(4, 8)
    profile = memfit.profile(model, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = memfit.fit(model, rows, budget=2 * profile.peak_bytes)
    with fitted:
        assert warned_by(lambda: model(rows)) == []
        (told,) = warned_by(lambda: model(torch.randn(40, 8)))
        assert told.startswith("planned for rows float32[4, 8], got float32[40, 8]")
    assert "forward" not in vars(model)


def test_gradients_are_those_of_the_plain_step() -> None:
    model, other = Masked(), torch.randn(6, 8)
    plan = plan_for(model, torch.randn(4, 8))
    model(other).sum().backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with memfit.apply(model, plan), pytest.warns(UserWarning, match="gradients are right"):
        model(other).sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(plain, model.parameters(), strict=True))


def test_arguments_are_known_by_name_however_they_are_passed() -> None:
    model, rows, mask = Masked(), torch.randn(4, 8), torch.ones(4, 1)
    with memfit.apply(model, plan_for(model, (rows, mask))):
        assert warned_by(lambda: model(mask=mask, rows=rows)) == []
        (told,) = warned_by(lambda: model(mask=torch.ones(5, 1), rows=rows[:1].expand(5, 8)))
    assert told.startswith("planned for rows float32[4, 8], got float32[5, 8]; for mask float32[4, 1], got")


def test_passes_without_gradients_are_left_alone() -> None:
    model = Masked()
    with memfit.apply(model, plan_for(model, torch.randn(4, 8))), torch.no_grad():
        assert warned_by(lambda: model(torch.randn(6, 8))) == []


def test_plans_that_record_all_of_the_model_tell_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    profile = memfit.profile(model, torch.randn(4, 8))
    plan = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["*"])
    around = memfit.Plan(plan.decisions, ("",), ("",), plan.recompute_flops, plan.fingerprint, inputs=plan.inputs)
    with memfit.apply(model, around), pytest.warns(UserWarning, match=r"planned for input float32\[4, 8\]"):
        model(torch.randn(6, 8))


def test_a_plan_that_does_not_know_its_inputs_says_nothing() -> None:
    model = Masked()
    plan = plan_for(model, torch.randn(4, 8))
    old = memfit.Plan(
        plan.decisions, plan.recorded_modules, plan.hooked_modules, plan.recompute_flops, plan.fingerprint
    )
    with memfit.apply(model, old):
        assert warned_by(lambda: model(torch.randn(6, 8))) == []


def test_differences_are_told_up_to_three() -> None:
    def inputs(size: int, *names: str) -> list[Input]:
        return [Input(name, "int64", (size,)) for name in names]

    assert difference_in_words(inputs(1, "a", "b"), inputs(1, "b", "a")) is None
    assert difference_in_words(inputs(1, "a"), inputs(2, "a")) == "planned for a int64[1], got int64[2]"
    assert difference_in_words(inputs(1, *"abcde"), inputs(2, *"abc")) == (
        "planned for a int64[1], got int64[2]; for b int64[1], got int64[2]; for c int64[1], got int64[2]; and 2 more"
    )
    assert difference_in_words([], inputs(2, "a")) == "planned for a absent, got int64[2]"


def test_a_call_that_does_not_fit_the_signature_is_for_the_model_to_refuse() -> None:
    one = torch.ones(1)
    assert inputs_of(lambda rows: rows, (one, one), {"z": one}) == tuple(
        Input(name, "float32", (1,)) for name in ("0", "1", "z")
    )
