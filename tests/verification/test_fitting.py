"""``fit``: what it leaves on the model, what it warns of, and that it never leaves a plan that breaks its promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.verification.odd_models import (
    Chain,
    DoublesUnderAPlan,
    Hoards,
    InterruptedUnderAPlan,
    NeedsAPlan,
    NeverTheSame,
)

import memfit
from memfit.fitting import fit
from memfit.verification.verifying import verify

BATCH_ROWS = 64


def batch() -> torch.Tensor:
    return torch.randn(BATCH_ROWS, 8)


def peaks_of(model: torch.nn.Module) -> tuple[int, int]:
    """Return the peak of the plain step, and the smallest that a plan can reach."""
    profile = memfit.profile(model, batch())
    with pytest.raises(memfit.InfeasibleBudgetError) as caught:
        memfit.plan(profile, budget=1)
    return profile.peak_bytes, caught.value.minimum_bytes


class Stages:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.num_missing_steps = 0

    def stage(self, name: str, num_steps: int | None = None) -> None:
        self.names.append(name)
        self.num_missing_steps += num_steps or 0

    def advance(self) -> None:
        self.num_missing_steps -= 1


def test_the_model_trains_within_its_budget_and_the_result_has_the_proof() -> None:
    model = Chain()
    plain_peak_bytes, minimum_bytes = peaks_of(model)
    budget_bytes = (plain_peak_bytes + minimum_bytes) // 2
    with fit(model, batch(), budget=budget_bytes) as fitted:
        assert isinstance(fitted, memfit.Applied)
        assert model.is_planned()
        assert fitted.profile.peak_bytes == plain_peak_bytes
        assert fitted.plan.budget_bytes == budget_bytes
        assert fitted.verification.peak_bytes == fitted.plan.predicted_peak_bytes <= budget_bytes
        assert fitted.verification.gradients_equal
    assert not model.is_planned()


def test_progress_is_told_every_stage_and_every_step() -> None:
    model = Chain()
    stages = Stages()
    fit(model, batch(), budget=peaks_of(model)[1], progress=stages).remove()
    assert stages.names == [
        "profiling the plain step",
        "planning",
        "comparing gradients and peaks",
        "timing",
        "timing",
    ]
    assert stages.num_missing_steps == 0


def test_nothing_is_printed_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    model = Chain()
    fit(model, batch(), budget=peaks_of(model)[1]).remove()
    assert capsys.readouterr() == ("", "")


def test_a_budget_above_the_plain_peak_warns_that_nothing_changes() -> None:
    model = Chain()
    with pytest.warns(UserWarning, match="the plan changes nothing: the plain step peaks at .* the budget of 1.00 GiB"):
        fitted = fit(model, batch(), budget="1GiB")
    assert fitted.plan.recorded_modules == ()
    # Nothing but a look at what the model is called with, since larger batches break the budget all the same.
    assert fitted.is_applied
    assert not any("forward" in vars(module) for module in model.blocks.modules())
    fitted.remove()
    assert not model.is_planned()


def test_a_peak_over_the_budget_is_planned_again_with_room_for_the_miss() -> None:
    model = Hoards()
    plain_peak_bytes, minimum_bytes = peaks_of(model)
    model.extra_bytes = (plain_peak_bytes - minimum_bytes) // 4
    stages = Stages()
    with pytest.warns(UserWarning, match="the measured peak, .* is .*% above the predicted"):
        fitted = fit(model, batch(), budget=plain_peak_bytes - 1, progress=stages)
    assert "planning again" in stages.names
    assert fitted.plan.budget_bytes == plain_peak_bytes - 1
    assert fitted.plan.predicted_peak_bytes < fitted.verification.peak_bytes <= plain_peak_bytes - 1
    fitted.remove()


def test_every_plan_may_use_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Hoards()
    plain_peak_bytes, minimum_bytes = peaks_of(model)
    model.extra_bytes = (plain_peak_bytes - minimum_bytes) // 4
    asked: list[tuple[int, object]] = []

    def noting(profile: memfit.ModelProfile, *, budget: int, host_budget: object) -> memfit.Plan:
        asked.append((budget, host_budget))
        return memfit.plan(profile, budget=budget)

    monkeypatch.setattr("memfit.fitting.plan_step", noting)
    with pytest.warns(UserWarning, match="above the predicted"):
        fit(model, batch(), budget=plain_peak_bytes - 1, host_budget="64GiB").remove()
    assert len(asked) == 2
    assert asked[1][0] < asked[0][0] == plain_peak_bytes - 1
    assert [host_budget for _, host_budget in asked] == ["64GiB", "64GiB"]


@pytest.mark.parametrize(
    ("host_budget", "told"), [(0.5, r"got 0\.5 \(float\)"), (-1, "negative"), ("much", "not a size")]
)
def test_a_wrong_host_budget_is_told_before_anything_runs(host_budget: object, told: str) -> None:
    stages = Stages()
    with pytest.raises(memfit.InvalidParameterError, match=told):
        fit(Chain(), batch(), budget="1GiB", host_budget=host_budget, progress=stages)  # type: ignore[arg-type]
    assert stages.names == []


def test_a_cpu_has_nowhere_to_offload_to() -> None:
    model = Chain()
    with pytest.raises(memfit.InvalidParameterError, match="a CPU's memory is the host's"):
        fit(model, batch(), budget="1GiB", host_budget="auto")
    assert not model.is_planned()


def test_a_miss_that_leaves_no_room_is_infeasible_and_nothing_is_applied() -> None:
    model = Hoards()
    plain_peak_bytes, minimum_bytes = peaks_of(model)
    model.extra_bytes = 2 * plain_peak_bytes
    with pytest.raises(memfit.InfeasibleBudgetError, match="above what the profile predicts") as caught:
        fit(model, batch(), budget=plain_peak_bytes - 1)
    assert caught.value.minimum_bytes > minimum_bytes
    assert not model.is_planned()


def test_a_plan_that_changes_gradients_is_refused_and_not_applied() -> None:
    model = DoublesUnderAPlan()
    with pytest.raises(memfit.VerificationError, match=r"changed the gradients of blocks.0.0.weight, .* and 5 more"):
        fit(model, batch(), budget=peaks_of(model)[1])
    assert not model.is_planned()


def test_peaks_that_stay_over_the_budget_are_refused_and_nothing_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(num_blocks=12)
    budget_bytes = peaks_of(model)[0] - 1

    def verified(*_: object, **__: object) -> memfit.Verification:
        return replace(verify(model, plan, batch()), budget_bytes=budget_bytes, peak_bytes=budget_bytes + 1)

    plan = memfit.plan(memfit.profile(model, batch()), budget=budget_bytes)
    monkeypatch.setattr("memfit.fitting.verify_step", verified)
    with pytest.raises(memfit.VerificationError, match=r"over the budget of .*, after 4 plans"):
        fit(model, batch(), budget=budget_bytes)
    assert not model.is_planned()


def test_fitting_again_replaces_the_plan() -> None:
    model = Chain(num_blocks=12)
    budget_bytes = peaks_of(model)[1]
    first = fit(model, batch(), budget=budget_bytes)
    second = fit(model, batch(), budget=budget_bytes)
    assert not first.is_applied
    assert second.is_applied
    assert second.profile.peak_bytes == first.profile.peak_bytes
    second.remove()
    assert not model.is_planned()


def test_a_step_that_differs_from_itself_is_refused_with_the_reason() -> None:
    model = NeverTheSame(growth=0.1)
    with pytest.raises(
        memfit.MemfitError, match=r"differs from itself .*: its gradients by 0\.\d+ of their length.* state outside"
    ):
        fit(model, batch(), budget=peaks_of(model)[1])
    assert not model.is_planned()


def test_an_infeasible_budget_leaves_the_model_plain() -> None:
    model = Chain()
    with pytest.raises(memfit.InfeasibleBudgetError):
        fit(model, batch(), budget=10)
    assert not model.is_planned()


def test_a_model_whose_plain_step_does_not_fit_the_device_is_planned_on_fake_tensors() -> None:
    model = NeedsAPlan()
    plain_peak_bytes, minimum_bytes = peaks_of(model)
    model.is_large = True
    budget_bytes = (plain_peak_bytes + minimum_bytes) // 2
    with fit(model, batch(), budget=budget_bytes) as fitted:
        assert fitted.profile.measured_with.startswith("fake tensors")
        assert fitted.profile.peak_bytes == plain_peak_bytes
        assert fitted.verification.plain_peak_bytes is None
        assert fitted.verification.peak_bytes == fitted.plan.predicted_peak_bytes <= budget_bytes


def test_a_model_on_two_devices_is_refused_with_both_named() -> None:
    model = Chain()
    model.blocks[1].to("meta")
    with pytest.raises(
        memfit.InvalidParameterError, match="has parameters on cpu and meta; a budget is for one device"
    ):
        fit(model, batch(), budget="1GiB")


@pytest.mark.parametrize("budget", ["20 bananas", -1, True, 1.5])
def test_a_budget_that_cannot_be_is_told_before_anything_runs(budget: float | str) -> None:
    stages = Stages()
    with pytest.raises(memfit.InvalidParameterError):
        fit(Chain(), batch(), budget=budget, progress=stages)
    assert stages.names == []


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(memfit.InvalidParameterError, match=r"model is a torch.nn.Module, got function"):
        fit(lambda x: x, batch(), budget="1GiB")


def test_after_ctrl_c_in_the_planned_step_the_model_is_as_it_was() -> None:
    class ArmsTheModel(Stages):
        def stage(self, name: str, num_steps: int | None = None) -> None:
            model.is_armed = name.startswith("comparing")

    model = InterruptedUnderAPlan()
    minimum_bytes = peaks_of(model)[1]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        fit(model, batch(), budget=minimum_bytes, progress=ArmsTheModel())
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Residual(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.filterwarnings("ignore")
def test_a_block_that_the_user_compiled_may_release_a_value_before_its_backward_pass_reads_it() -> None:
    model = torch.nn.Sequential(*(Residual(32) for _ in range(4)))
    model[1] = torch.compile(model[1], backend="aot_eager")
    batch = torch.randn(128, 32)
    plain_peak = memfit.profile(model, batch, loss=torch.sum).peak_bytes
    assert memfit.fit(model, batch, loss=torch.sum, budget=int(0.8 * plain_peak)).verification.holds
