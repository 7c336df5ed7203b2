"""``tune``: the fastest batch size within a budget, and what is wrong with its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sizes.small_models import Tower, rows, run_out_of_memory
from torch import Tensor, nn
from typer.testing import CliRunner

import memfit
from memfit.cli.main import app
from memfit.runtime.torch_internals import FakeTensor
from memfit.tuning.fastest_sizes import failed, measured, run_fastest
from memfit.tuning.tuned import TunedSize


def make_batch(size: int) -> Tensor:
    return rows(size)


def peak_bytes_of(size: int) -> int:
    return memfit.profile(Tower(), make_batch(size), mode="fake").peak_bytes


@pytest.mark.filterwarnings("ignore:the plan changes nothing")
def test_the_chosen_size_is_the_fastest_of_the_table_and_its_plan_is_applied() -> None:
    tuned_model = Tower()
    budget = peak_bytes_of(64)
    tuned = memfit.tune(tuned_model, make_batch, budget=budget, sizes=[80, 64, 4096])
    by_size = {row.size: row for row in tuned.table}
    assert list(by_size) == [64, 80, 4096]
    assert tuned.size in (64, 80)
    chosen = by_size[tuned.size]
    assert chosen.is_measured
    assert chosen.throughput == tuned.throughput == tuned.size / chosen.seconds
    assert chosen.plan == tuned.fitted.plan
    assert chosen.peak == tuned.fitted.verification.peak_bytes <= budget
    # The plain step of 80 is above the budget, and no plan helps 4096.
    assert by_size[80].plan is not None
    assert by_size[80].plan.changes_anything
    assert (by_size[4096].plan, by_size[4096].throughput, by_size[4096].problem) == (None, 0.0, "not within the budget")
    assert all(row.peak_bytes <= budget for row in tuned.table if row.plan is not None)
    assert tuned.fitted.is_applied
    assert tuned.fitted.model is tuned_model
    assert f"size  {tuned.size}, " in repr(tuned)
    assert json.loads(json.dumps(tuned.document()))["table"][0]["size"] == 64
    tuned.fitted.remove()


@pytest.mark.filterwarnings("ignore:the plan changes nothing")
def test_sizes_are_searched_up_to_the_largest_that_fits_and_divide_the_global_batch() -> None:
    tuned_model = Tower()
    tuned = memfit.tune(tuned_model, make_batch, budget=2 * peak_bytes_of(2), global_batch=6)
    assert [row.size for row in tuned.table] == [1, 2, 3, 6]
    assert tuned.accumulation * tuned.size == 6
    tuned.fitted.remove()


@pytest.mark.filterwarnings("ignore:the plan changes nothing")
def test_random_numbers_are_drawn_as_without_tuning() -> None:
    model, budget = Tower(), peak_bytes_of(4)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    memfit.tune(model, make_batch, budget=budget, sizes=[1, 2]).fitted.remove()
    assert torch.equal(torch.rand(3), expected)


def test_a_smallest_size_that_no_plan_can_keep_is_not_run_plain() -> None:
    model = TakesBatchesOf(0)
    with pytest.raises(memfit.InfeasibleBudgetError, match="not even a batch of size 4096 can be kept"):
        memfit.tune(model, make_batch, budget=peak_bytes_of(16), sizes=[4096])
    assert model.num_runs == 0


def test_nothing_is_changed_where_not_even_one_sample_fits() -> None:
    tuned_model = Tower()
    before = {name: each.clone() for name, each in tuned_model.state_dict().items()}
    with pytest.raises(memfit.InfeasibleBudgetError, match="not even a batch of size 1 can be kept") as caught:
        memfit.tune(tuned_model, make_batch, budget=1000)
    assert caught.value.minimum_bytes > 1000
    assert all("forward" not in vars(module) for module in tuned_model.modules())
    assert all(torch.equal(each, before[name]) for name, each in tuned_model.state_dict().items())
    assert all(each.grad is None for each in tuned_model.parameters())


class TakesBatchesOf(Tower):
    """Refuses batches of odd sizes, and runs out of memory on large ones, except with fake tensors."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.num_runs = 0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) % 2:
            raise ValueError("an even number of samples, please")
        self.num_runs += not isinstance(x, FakeTensor)
        if len(x) > self.most and not isinstance(x, FakeTensor):
            run_out_of_memory()
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:the plan changes nothing")
def test_sizes_that_do_not_run_or_run_out_of_memory_are_in_the_table_and_not_chosen() -> None:
    tuned = memfit.tune(TakesBatchesOf(16), make_batch, budget="1MiB", sizes=[7, 8, 9, 16, 32, 64])
    problems = {row.size: row.problem for row in tuned.table}
    assert "an even number of samples" in problems[7]
    assert "an even number of samples" in problems[9]
    assert {problems[32], problems[64]} <= {
        "the device ran out of memory",
        "size 32 ran out of memory",
    }
    assert problems[8] == problems[16] == ""
    assert tuned.size in (8, 16)
    tuned.fitted.remove()


def test_a_step_that_runs_out_of_memory_at_every_size_is_an_error() -> None:
    model = TakesBatchesOf(0)
    with pytest.raises(memfit.MemfitError, match="ran out of memory at every size that was tried"):
        memfit.tune(model, make_batch, budget="1MiB", sizes=[2, 4])
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_three_sizes_that_are_predicted_to_be_fastest_are_run_and_correct_the_others() -> None:
    plan = memfit.Plan({}, (), (), 0, "model")
    rows = {size: TunedSize(size, 100, 1.0, float(size), plan) for size in (1, 2, 4, 8, 16, 32)}
    # The median is four times as long as predicted.
    seconds = {8: 2.0, 16: 4.0, 4: 5.0}

    def run(row: TunedSize) -> TunedSize:
        if row.size == 32:
            return failed(row, "the device ran out of memory")
        return measured(row, 100, seconds[row.size])

    run_fastest(rows, run)
    assert [size for size, row in rows.items() if row.is_measured] == [4, 8, 16]
    assert [row.throughput for row in rows.values()] == [1 / 4, 2 / 4, 4 / 5, 4.0, 4.0, 0.0]
    assert rows[32].problem == "the device ran out of memory"


def raising(size: int) -> Tensor:
    raise ValueError("no such file")


def other_form(size: int) -> Any:
    return make_batch(size) if size < 2 else (make_batch(size), None, make_batch(size))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (raising, {}, r"make_batch\(1\) raised ValueError: no such file"),
        (other_form, {}, r"make_batch\(1\) and make_batch\(2\) differ in more than sizes"),
        (lambda size: None, {}, r"make_batch\(1\) returned None"),
        (lambda size: rows(4), {}, r"make_batch\(1\) and make_batch\(2\) returned batches of the same shapes"),
        # As slices of too few samples have them.
        (lambda size: rows(min(size, 6)), {}, r"make_batch\(8\) and make_batch\(16\) returned batches of the same"),
        (torch.zeros(2), {}, "make_batch is a function"),
        (make_batch, {"targets": rows(2), "loss": nn.MSELoss()}, "targets is a function"),
        (make_batch, {"sizes": "4,8"}, "sizes must be a whole number"),
        (make_batch, {"compile": "yes"}, "compile is True, False"),
        (make_batch, {"sizes": []}, "sizes must be a list of batch sizes"),
        (make_batch, {"sizes": 4}, "sizes must be a list of batch sizes"),
        (make_batch, {"sizes": [0]}, "sizes must be a whole number, at least 1"),
        (make_batch, {"sizes": [5], "global_batch": 8}, "none of the sizes divides the global batch of 8"),
        (make_batch, {"global_batch": 0}, "global_batch must be a whole number"),
        (make_batch, {"chunk_loss": True}, "chunk_loss=True needs the output projection"),
    ],
)
def test_wrong_arguments_are_named(given: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(memfit.InvalidParameterError, match=message):
        memfit.tune(Tower(), given, budget="1GiB", **options)


@pytest.mark.filterwarnings("ignore:the plan changes nothing")
def test_the_command_prints_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "training.py"
    script.write_text(
        "import torch\n"
        "from memfit.models import gpt\n"
        "def target():\n"
        "    model, _ = gpt(layers=1, width=16, heads=2, batch=1, length=8, vocabulary=16)\n"
        "    return model, lambda size: torch.randint(16, (size, 9))\n",
        encoding="utf-8",
    )
    result = CliRunner().invoke(app, ["tune", f"{script}:target", "--budget", "1GiB", "--sizes", "1,2", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["size"] for row in document["table"]] == [1, 2]
    assert document["size"] in (1, 2)


def test_the_command_refuses_sizes_that_are_none() -> None:
    result = CliRunner().invoke(app, ["tune", "memfit.models:gpt", "--budget", "1GiB", "--sizes", "1,x"])
    assert result.exit_code == 2
    assert "--sizes is a list of batch sizes" in result.output
