"""Whole steps with compiled blocks: peaks by the allocator's events, gradients bit for bit, models left as they were.

Each model is compiled once, with few partitions; compiling takes seconds on a CPU.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.compiled.compiled_models import WIDTH, BranchingBlock, dropout_model
from torch import Tensor, nn

import memfit
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.models import gpt, llama
from memfit.profiling import with_compiled_blocks

SMALL = {"layers": 3, "width": WIDTH, "heads": 2, "batch": 8, "length": 32, "vocabulary": 64}
BUILDERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "gpt": lambda: gpt(**SMALL),
    "llama": lambda: llama(**SMALL, key_heads=1),
    "dropout": dropout_model,
}


class Case(NamedTuple):
    """A model with a batch, and its profile with compiled blocks."""

    model: nn.Module
    batch: Tensor
    profile: memfit.ModelProfile

    def plan(self, share: float) -> memfit.Plan:
        """Return the plan for a budget between the smallest peak (0) and that of the fastest plan (1)."""
        points = memfit.frontier(self.profile, points=2)
        low, high = points[-1].peak_bytes, points[0].peak_bytes
        return memfit.plan(self.profile, budget=low + round(share * (high - low)))


@functools.cache
def measured(name: str, num_cuts: int = 2) -> Case:
    model, batch = BUILDERS[name]()
    step = TrainingStep(model, StepArguments(batch, None, None, None, None, "fresh"))
    return Case(model, batch, with_compiled_blocks(memfit.profile(model, batch), step, num_cuts=num_cuts))


@pytest.fixture(scope="module", params=list(BUILDERS))
def case(request: pytest.FixtureRequest) -> Case:
    return measured(request.param)


@pytest.fixture(scope="module")
def with_dropout() -> Case:
    return measured("dropout")


def gradients(model: nn.Module, batch: Tensor, seed: int = 5) -> list[Tensor]:
    """Return the gradients of a step, and after it a random number."""
    model.zero_grad()
    torch.manual_seed(seed)
    model(batch).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None] + [torch.rand(1)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def test_peaks_are_as_predicted_and_gradients_those_of_the_step_that_saves_everything(case: Case) -> None:
    peaks = set()
    for share in (1.0, 0.5, 0.0):
        plan = case.plan(share)
        verification = memfit.verify(case.model, plan, case.batch)
        assert verification.gradients_equal
        assert verification.plain_reproducible
        assert verification.compared_with == "compiled step that saves everything"
        assert verification.within_budget
        assert abs(verification.peak_miss) < 0.02
        peaks.add(verification.peak_bytes)
    assert len(peaks) == 3


def test_a_step_with_dropout_is_recomputed_with_the_same_random_numbers(with_dropout: Case) -> None:
    model, batch, _ = with_dropout
    plan = with_dropout.plan(0.0)
    assert plan.compiled is not None
    assert set(plan.compiled.choice.values()) != {"everything"}
    with memfit.apply(model, plan):
        recomputed = gradients(model, batch)
    with memfit.apply(model, memfit.plan(with_dropout.profile, budget="1GiB")):
        fastest = gradients(model, batch)
    assert same(recomputed, fastest)
    assert not same(recomputed[:-1], gradients(model, batch, seed=6)[:-1])


def test_profiling_leaves_running_statistics_and_random_numbers_alone() -> None:
    model, batch = dropout_model()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    random_state = torch.get_rng_state()
    step = TrainingStep(model, StepArguments(batch, None, None, None, None, "fresh"))
    with_compiled_blocks(memfit.profile(model, batch), step, num_cuts=2)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_plan_from_a_file_runs_on_a_new_model_without_compiling_again(with_dropout: Case, tmp_path: Path) -> None:
    plan = with_dropout.plan(0.5)
    plan.save(tmp_path / "plan.json")
    with memfit.apply(with_dropout.model, plan):
        expected = gradients(with_dropout.model, with_dropout.batch)
    model, batch = dropout_model()
    model.load_state_dict(with_dropout.model.state_dict())
    with torch.compiler.set_stance("fail_on_recompile"), memfit.apply(model, memfit.Plan.load(tmp_path / "plan.json")):
        again = gradients(model, batch)
    assert same(expected, again)


def test_a_removed_plan_leaves_the_eager_model(with_dropout: Case) -> None:
    model, batch, _ = with_dropout
    eager = gradients(model, batch)
    names = [set(vars(module)) for module in model.modules()]
    applied = memfit.apply(model, with_dropout.plan(0.0))
    assert not same(eager, gradients(model, batch))
    applied.remove()
    assert same(eager, gradients(model, batch))
    assert [set(vars(module)) for module in model.modules()] == names


def test_blocks_that_the_user_compiled_are_planned_and_given_back(with_dropout: Case) -> None:
    plan = with_dropout.plan(0.0)
    model, batch = dropout_model()
    model.load_state_dict(with_dropout.model.state_dict())
    for block in model.blocks:
        block.compile(backend="eager")
    theirs = [block._compiled_call_impl for block in model.blocks]
    with memfit.apply(with_dropout.model, plan):
        expected = gradients(with_dropout.model, batch)
    with memfit.apply(model, plan):
        assert same(expected, gradients(model, batch))
    assert [block._compiled_call_impl for block in model.blocks] == theirs


def test_steps_without_gradients_run_in_eager(with_dropout: Case) -> None:
    model, batch, _ = with_dropout
    model.eval()
    try:
        with torch.no_grad():
            eager = model(batch)
            with memfit.apply(model, with_dropout.plan(0.0)):
                assert torch.equal(model(batch), eager)
    finally:
        model.train()


def test_fit_keeps_the_budget_with_compiled_blocks(with_dropout: Case) -> None:
    model, batch = dropout_model()
    eager = gradients(model, batch)
    budget = with_dropout.plan(0.4).predicted_peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = memfit.fit(model, batch, budget=budget, compile=True)
    assert fitted.plan.compiled is not None
    assert fitted.verification.holds
    assert fitted.verification.peak_bytes <= budget
    assert "compiled" in repr(fitted.plan)
    fitted.remove()
    assert same(eager, gradients(model, batch))


def test_auto_keeps_one_of_both(with_dropout: Case) -> None:
    model, batch = dropout_model()
    with memfit.fit(model, batch, budget=with_dropout.profile.peak_bytes - 10_000, compile="auto") as fitted:
        assert fitted.verification.holds


def test_blocks_that_cannot_be_compiled_stay_in_eager_and_say_why() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(BranchingBlock() for _ in range(3)))
    batch = torch.randn(8, WIDTH)
    step = TrainingStep(model, StepArguments(batch, torch.sum, None, None, None, "fresh"))
    profile = memfit.profile(model, batch, loss=torch.sum)
    compiled = with_compiled_blocks(profile, step, num_cuts=2).compiled
    assert compiled is not None
    assert compiled.kinds == ()
    assert set(compiled.not_compiled) == {"0", "1", "2"}
    with pytest.warns(UserWarning, match="3 blocks stay in eager"), pytest.warns(match="the plan changes nothing"):
        fitted = memfit.fit(model, batch, loss=torch.sum, budget=profile.peak_bytes, compile=True)
    assert fitted.plan.compiled is None
    assert fitted.verification.holds


def test_compile_is_true_false_or_auto() -> None:
    with pytest.raises(memfit.InvalidParameterError, match="compile is True, False or \"auto\"; got 'always'"):
        memfit.fit(nn.Linear(2, 2), torch.ones(1, 2), budget="1GiB", compile="always")  # type: ignore[arg-type]
