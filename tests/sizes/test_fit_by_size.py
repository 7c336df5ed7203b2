"""``fit(batches=...)``: every size within the budget, with the plain step's gradients, by a plan that is fast for it.

The tests of one fitted model share it, and run in this order: the last ones change it and remove it.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.sizes.small_models import Tower, rows, run_out_of_memory
from torch import Tensor, nn

import memfit
from memfit.models import gpt
from memfit.runtime.allocation_meter import allocated_peak
from memfit.runtime.applying.forward_wrapping import plans_set_aside

CPU = torch.device("cpu")
SHORTEST, LONGEST = 8, 48
NUM_CLASSES = 32


def draw(length: int, rows: int = 4) -> Tensor:
    return torch.randint(NUM_CLASSES, (rows, length + 1))


def plain_peak(model: nn.Module, batch: Tensor) -> int:
    return memfit.profile(model, batch, mode="fake").peak_bytes


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    made, _ = gpt(layers=2, width=16, heads=2, batch=4, length=4 * LONGEST, vocabulary=NUM_CLASSES)
    return made


@pytest.fixture(scope="module")
def budget_bytes(model: nn.Module) -> int:
    shortest, longest = (plain_peak(model, draw(length)) for length in (SHORTEST, LONGEST))
    return shortest + (longest - shortest) * 7 // 10


@pytest.fixture(scope="module")
def fitted(model: nn.Module, budget_bytes: int) -> Iterator[memfit.Fitted]:
    with memfit.fit(model, batches=[draw(SHORTEST), draw(LONGEST)], budget=budget_bytes) as applied:
        yield applied


def gradients(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(batch).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def peak_bytes(model: nn.Module, batch: Tensor) -> int:
    model.zero_grad()
    return allocated_peak(lambda: model(batch).backward(), CPU, [*model.parameters(), *model.buffers(), batch])


def test_no_step_of_any_length_is_above_the_budget(fitted: Any, model: nn.Module, budget_bytes: int) -> None:
    lengths = random.Random(0).choices(range(1, LONGEST + 1), k=60)
    peaks = {length: peak_bytes(model, draw(length)) for length in [*lengths, LONGEST]}
    assert max(peaks.values()) <= budget_bytes
    # The plain step is above it, or nothing would be shown.
    assert fitted.verification.plain_peak_bytes > budget_bytes


def test_gradients_of_every_length_have_the_bits_of_the_plain_step(fitted: Any, model: nn.Module) -> None:
    for length in (SHORTEST, 20, 30, 40, 47, LONGEST):
        batch = draw(length)
        with plans_set_aside(model):
            expected = gradients(model, batch)
        for name, gradient in gradients(model, batch).items():
            assert torch.equal(gradient, expected[name]), name


def test_short_batches_run_plain_and_long_ones_recompute(fitted: Any) -> None:
    entries = sorted(fitted.plans.entries, key=lambda entry: entry.sizes)
    assert not entries[0].plan.changes_anything
    assert entries[-1].plan.changes_anything
    assert entries[-1].plan == fitted.plan
    # The plan for a size serves all sizes down to the next: their own would be at most a hundredth faster, as none is
    # faster than that of a smaller size. No size lies between the first that needs a plan, with what every planned
    # pass costs, and the one before.
    overhead = 0.0
    for before, after in pairwise(entries):
        overhead = max(overhead, before.plan.predicted_overhead)
        is_close = after.plan.predicted_overhead - overhead <= 0.01 + 1e-9
        assert is_close or after.sizes[0] - before.sizes[0] == 1


def test_smaller_batches_of_the_same_length_find_a_plan_too(fitted: Any, model: nn.Module, budget_bytes: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peak_bytes(model, draw(LONGEST, rows=3)) <= budget_bytes


def test_a_larger_size_is_planned_for_when_it_comes(fitted: Any, model: nn.Module, budget_bytes: int) -> None:
    batch = draw(LONGEST + 2)
    with pytest.warns(UserWarning, match=r"size 51 is larger than the largest that was planned for \(49\)"):
        model(batch).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peak_bytes(model, batch) <= budget_bytes
        assert peak_bytes(model, draw(LONGEST + 3)) <= budget_bytes


def test_a_size_that_cannot_be_kept_within_the_budget_is_refused(fitted: Any, model: nn.Module) -> None:
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(memfit.InfeasibleBudgetError, match="the largest size that fits is about"):
        model(draw(4 * LONGEST))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    model(draw(SHORTEST)).backward()


class RunsOut(nn.Module):
    """Raises as an allocator does, so many times. It has a buffer and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.register_buffer("num_calls", torch.zeros(()))
        self.num_failures = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        loss: Tensor = self.tower(torch.nn.functional.dropout(x, 0.1))
        if self.num_failures:
            self.num_failures -= 1
            run_out_of_memory()
        return loss


def test_run_repeats_a_step_that_ran_out_of_memory_by_a_smaller_plan() -> None:
    model, batch = RunsOut(), rows(64)
    fitted = memfit.fit(model, batch, budget=int(0.9 * plain_peak(model, batch)))

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = model(batch)
        loss.backward()
        return loss.detach()

    # Gradients of an earlier step, which this one adds to.
    step(batch)
    begun = [each.grad.clone() for each in model.parameters()]
    torch.manual_seed(1)
    expected = step(batch)
    gradients = [each.grad.clone() for each in model.parameters()]
    calls = model.num_calls.item()
    for each, gradient in zip(model.parameters(), begun, strict=True):
        each.grad = gradient
    torch.manual_seed(1)
    first_peak = fitted.plan.predicted_peak_bytes
    model.num_failures = 1
    with pytest.warns(UserWarning, match="repeated by a smaller plan"):
        assert torch.equal(fitted.run(step, batch), expected)
    assert all(torch.equal(each.grad, gradient) for each, gradient in zip(model.parameters(), gradients, strict=True))
    assert model.num_calls.item() == calls + 1
    assert fitted.num_retries == 1
    assert fitted.plan.predicted_peak_bytes <= 0.9 * first_peak
    fitted.remove()


def test_run_gives_up_at_the_smallest_plan_and_leaves_everything_as_it_was() -> None:
    model, batch = RunsOut(), rows(64)
    with pytest.warns(UserWarning, match="the plan changes nothing"):
        fitted = memfit.fit(model, batch, budget="1GiB")
    model.num_failures = 10**9
    with (
        pytest.warns(UserWarning, match="smaller plan"),
        pytest.raises(torch.OutOfMemoryError, match="by the smallest plan that there is"),
    ):
        fitted.run(lambda batch: model(batch).backward(), batch)
    assert model.num_calls == 0
    assert all(each.grad is None for each in model.parameters())
    fitted.remove()


def test_run_by_size_takes_the_plan_of_a_larger_size(fitted: Any, model: nn.Module) -> None:
    failing = True

    def step(batch: Tensor) -> None:
        nonlocal failing
        loss = model(batch)
        if failing:
            failing = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        loss.backward()

    with pytest.warns(UserWarning, match="the plan of a larger size"):
        fitted.run(step, draw(SHORTEST))
    assert fitted.num_retries == 1


def test_steps_that_changed_parameters_are_not_repeated(fitted: Any, model: nn.Module) -> None:
    def step(batch: Tensor) -> None:
        with torch.no_grad():
            next(model.parameters()).add_(0)
        raise torch.OutOfMemoryError("CUDA out of memory")

    num_retries = fitted.num_retries
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):
        fitted.run(step, draw(20))
    assert fitted.num_retries == num_retries


def test_removing_leaves_the_model_as_it_was(fitted: Any, model: nn.Module) -> None:
    model(draw(LONGEST)).backward()
    model(draw(SHORTEST)).backward()
    assert "forward" in vars(model)
    memfit.remove(model)
    assert not fitted.is_applied
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (torch.zeros(2, 3), "batches must be a list of at least two batches"),
        ([torch.zeros(2, 3)], "got 1 of them"),
        ([torch.zeros(2, 3), torch.zeros(2, 3)], "must differ in at least one size"),
        ([torch.zeros(2, 3), torch.zeros(2, 3, 4)], "numbers of dimensions of batch differ"),
        ([{"x": torch.zeros(2)}, {"y": torch.zeros(3)}], "batches must have the same tensors; batch 'x' is in some"),
        ([{"x": torch.zeros(2), "n": 2}, {"x": torch.zeros(3), "n": 3}], "the number at batch 'n' is 2 in one and 3"),
        ([torch.zeros(2, 9), torch.zeros(4, 3)], "one of the batches must be the largest in every size that varies"),
        ([3, 4], "batches must contain tensors"),
    ],
)
def test_batches_without_a_common_form_are_refused(batches: Any, message: str) -> None:
    with pytest.raises(memfit.InvalidParameterError, match=message):
        memfit.fit(nn.Linear(3, 3), batches=batches, budget="1GiB")


def test_batch_and_batches_are_not_given_together() -> None:
    with pytest.raises(memfit.InvalidParameterError, match="either batch or batches"):
        memfit.fit(nn.Linear(3, 3), torch.zeros(2, 3), batches=[torch.zeros(2, 3)], budget="1GiB")
