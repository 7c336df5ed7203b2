"""``fit(batches=...)`` where batches differ in more than one length, and where they cannot be planned for."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from tests.sizes.small_models import WIDTH, Tower, check_step, plain_peak_bytes, rows
from torch import Tensor, nn

import memfit
from memfit.fitted import FittedBySize


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def budget_between(model: nn.Module, small: Any, large: Any) -> int:
    """Return a budget that most sizes between keep without recomputation: every plan takes a while to make."""
    low, high = plain_peak_bytes(model, small), plain_peak_bytes(model, large)
    return low + (high - low) * 4 // 5


def test_rows_and_lengths_that_vary_on_their_own_each_have_plans() -> None:
    model = Tower()
    budget = budget_between(model, rows(1, 16), rows(2, 64))
    with memfit.fit(model, batches=[rows(1, 16), rows(2, 64)], budget=budget) as fitted:
        assert isinstance(fitted, FittedBySize)
        assert fitted.plans.largest.sizes == (2, 64)
        for shape in [(1, 16), (2, 64), (2, 16), (1, 64), (2, 50), (1, 1)]:
            check_step(model, rows(*shape), budget)
        # Neither needs recomputation, though the largest in that size does.
        for shape in [(2, 16), (1, 64)]:
            inputs = tuple(each._replace(shape=(*shape, WIDTH)) for each in fitted.plan.inputs)
            assert not fitted.plans.entries[fitted.plans.places_for(inputs)[0]].plan.changes_anything
        assert fitted.plan.changes_anything
        # Larger in one size only.
        with pytest.warns(UserWarning, match=r"size 1 x 70 is larger than the largest that was planned for \(2 x 64\)"):
            check_step(model, rows(1, 70), budget)
        # It runs plain, though one of 2 x 70 does not.
        inputs = tuple(each._replace(shape=(1, 70, WIDTH)) for each in fitted.plan.inputs)
        assert not fitted.plans.entries[fitted.plans.places_for(inputs)[0]].plan.changes_anything


def test_the_largest_size_that_fits_is_found_however_much_larger_a_batch_is() -> None:
    model = Tower(2)
    budget = budget_between(model, rows(2, 8), rows(2, 32))

    def can_be_planned(length: int) -> bool:
        try:
            memfit.plan(memfit.profile(model, rows(2, length), mode="fake"), budget=budget)
        except memfit.InfeasibleBudgetError:
            return False
        return True

    with (
        memfit.fit(model, batches=[rows(2, 8), rows(2, 32)], budget=budget),
        pytest.raises(memfit.InfeasibleBudgetError, match="the largest size that fits is about") as caught,
    ):
        model(rows(2, 640))
    found = re.search(r"that fits is about (\d+)", str(caught.value))
    assert found is not None
    assert can_be_planned(int(found[1]))
    assert not can_be_planned(int(1.06 * int(found[1])))


def test_larger_batches_are_measured_where_the_step_reads_numbers() -> None:
    class ReadsNumbers(Tower):
        def forward(self, x: Tensor) -> Tensor:
            assert x.abs().sum().item() > 0
            return super().forward(x)

    model = ReadsNumbers()
    budget = budget_between(model, rows(2, 8), rows(2, 16))
    message = r"size 18 is larger than the largest that was planned for \(16\)"
    with memfit.fit(model, batches=[rows(2, 8), rows(2, 16)], budget=budget), pytest.warns(UserWarning, match=message):
        check_step(model, rows(2, 18), budget)


def test_more_rows_than_in_any_batch_are_planned_for_or_refused() -> None:
    model = Tower()
    budget = budget_between(model, rows(8, 4), rows(8, 8))
    with memfit.fit(model, batches=[rows(8, 4), rows(8, 8)], budget=budget):
        with pytest.warns(UserWarning, match=r"with 10 in place of 8 in dimension 0"):
            check_step(model, rows(10, 8), budget)
        with pytest.raises(memfit.InfeasibleBudgetError, match="the largest size that fits is about 8"):
            model(rows(32, 8))
        check_step(model, rows(8, 8), budget)


def test_sizes_that_the_model_does_not_take_run_by_larger_plans() -> None:
    class MultiplesOfEight(Tower):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] % 8:
                raise ValueError("give a multiple of 8")
            return super().forward(x)

    model = MultiplesOfEight()
    budget = budget_between(model, rows(2, 8), rows(2, 32))
    with memfit.fit(model, batches=[rows(2, 8), rows(2, 32)], budget=budget) as fitted:
        assert isinstance(fitted, FittedBySize)
        assert all(sizes[0] % 8 == 0 for sizes in (entry.sizes for entry in fitted.plans.entries))
        for length in (8, 24, 32):
            check_step(model, rows(2, length), budget)
        with pytest.raises(ValueError, match="give a multiple of 8"):
            model(rows(2, 30))


def test_batches_on_which_the_step_runs_other_ops_are_refused() -> None:
    class InChunks(Tower):
        def forward(self, x: Tensor) -> Tensor:
            parts = x.split(8, 1) if x.shape[1] > 8 else (x,)
            return torch.cat([self.output(part) for part in parts], 1).square().mean()

    model = InChunks()
    budget = budget_between(model, rows(2, 4), rows(2, 16))
    message = r"runs other ops for a batch of size 4 than for one of size 16 \(1 and 2 matrix products and the like"
    with pytest.raises(memfit.InvalidParameterError, match=message):
        memfit.fit(model, batches=[rows(2, 4), rows(2, 16)], budget=budget)
    assert all("forward" not in vars(module) for module in model.modules())
    with memfit.fit(model, batches=[rows(2, 14), rows(2, 16)], budget=budget):
        check_step(model, rows(2, 15), budget)
        with pytest.warns(UserWarning, match="no plan can be made .*3 and 2 matrix products"):
            model(rows(2, 24))
        # Said once of each size.
        model(rows(2, 24))


def test_passes_that_wait_for_each_other_all_run_by_the_largest_plan() -> None:
    model = Tower()

    def step(pair: tuple[Tensor, Tensor]) -> None:
        one, other = pair
        (model(one) - model(other)).square().backward()

    def peak_bytes(pair: tuple[Tensor, Tensor]) -> int:
        return memfit.profile(model, pair, step=step, mode="fake").peak_bytes

    short, long = (rows(2, 8), rows(2, 8)), (rows(2, 32), rows(2, 32))
    budget = (peak_bytes(short) + peak_bytes(long)) // 2
    with pytest.warns(UserWarning, match="several forward passes before their backward pass"):
        fitted = memfit.fit(model, batches=[short, long], step=step, budget=budget)
    assert isinstance(fitted, FittedBySize)
    assert [entry.sizes for entry in fitted.plans.entries] == [(32,)]
    fitted.remove()


def test_packed_sequences_have_plans_for_the_given_sizes_only() -> None:
    class Packed(Tower):
        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            lengths = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
            return torch.cat([self.output(part) for part in x.split(lengths)]).square().mean()

    model = Packed()
    short, long = (rows(12), torch.tensor([4, 12])), (rows(96), torch.tensor([40, 96]))
    budget = budget_between(model, short, long)
    with memfit.fit(model, batches=[short, long], budget=budget) as fitted:
        assert isinstance(fitted, FittedBySize)
        assert [entry.sizes for entry in fitted.plans.entries] == [(12,), (96,)]
        check_step(model, (rows(50), torch.tensor([25, 50])), budget)


def test_nested_tensors_are_refused_with_what_to_do() -> None:
    batches = [torch.nested.nested_tensor([rows(length), rows(length + 1)], layout=torch.jagged) for length in (2, 9)]
    with pytest.raises(memfit.InvalidParameterError, match="batch is a nested or sparse tensor"):
        memfit.fit(Tower(), batches=batches, budget="1GiB")


def test_numbers_in_batches_of_own_classes_are_compared() -> None:
    class Batch:
        def __init__(self, length: int) -> None:
            self.x, self.length = rows(2, length), length

    class OfBatch(Tower):
        def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
            return super().forward(batch.x[:, : batch.length])

    with pytest.raises(memfit.InvalidParameterError, match="the number at batch 'length' is 4 in one and 9"):
        memfit.fit(OfBatch(), batches=[Batch(4), Batch(9)], budget="1GiB")
