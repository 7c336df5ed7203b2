"""``tune``: the fastest batch size within a budget, and what is wrong with its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import memfit
from memfit.cli.main import app
from memfit.models import gpt

NUM_CLASSES = 32
LENGTH = 16


def model() -> nn.Module:
    torch.manual_seed(0)
    return gpt(layers=2, width=16, heads=2, batch=1, length=LENGTH, vocabulary=NUM_CLASSES)[0]


def make_batch(size: int) -> Tensor:
    return torch.randint(NUM_CLASSES, (size, LENGTH + 1))


def peak_bytes_of(size: int) -> int:
    return memfit.profile(model(), make_batch(size), mode="fake").peak_bytes


@pytest.mark.filterwarnings("ignore:the plan changes nothing")
def test_the_chosen_size_is_the_fastest_of_the_table_and_its_plan_is_applied() -> None:
    tuned_model = model()
    budget = peak_bytes_of(8)
    tuned = memfit.tune(tuned_model, make_batch, budget=budget, sizes=[16, 8, 4096])
    rows = {row.size: row for row in tuned.table}
    assert list(rows) == [8, 16, 4096]
    assert tuned.size in (8, 16)
    chosen = rows[tuned.size]
    assert chosen.is_measured
    assert chosen.throughput == tuned.throughput == tuned.size / chosen.seconds
    assert chosen.plan == tuned.fitted.plan
    assert chosen.peak == tuned.fitted.verification.peak_bytes <= budget
    # The plain step of 16 is above the budget, and no plan helps 4096.
    assert rows[16].plan.changes_anything
    assert (rows[4096].plan, rows[4096].throughput) == (None, 0.0)
    assert all(row.peak_bytes <= budget for row in tuned.table if row.plan is not None)
    assert tuned.fitted.is_applied
    assert tuned.fitted.model is tuned_model
    assert f"size  {tuned.size}, " in repr(tuned)
    assert json.loads(json.dumps(tuned.document()))["table"][0]["size"] == 8
    tuned.fitted.remove()


@pytest.mark.filterwarnings("ignore:the plan changes nothing")
def test_sizes_are_searched_up_to_the_largest_that_fits_and_divide_the_global_batch() -> None:
    tuned_model = model()
    tuned = memfit.tune(tuned_model, make_batch, budget=peak_bytes_of(2), global_batch=6)
    assert [row.size for row in tuned.table][:2] == [1, 2]
    assert all(6 % row.size == 0 for row in tuned.table)
    assert tuned.accumulation * tuned.size == 6
    tuned.fitted.remove()


def test_nothing_is_changed_where_not_even_one_sample_fits() -> None:
    tuned_model = model()
    before = {name: each.clone() for name, each in tuned_model.state_dict().items()}
    with pytest.raises(memfit.InfeasibleBudgetError, match="not even a batch of size 1 can be kept") as caught:
        memfit.tune(tuned_model, make_batch, budget=1000)
    assert caught.value.minimum_bytes > 1000
    assert all("forward" not in vars(module) for module in tuned_model.modules())
    assert all(torch.equal(each, before[name]) for name, each in tuned_model.state_dict().items())
    assert all(each.grad is None for each in tuned_model.parameters())


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
        (torch.zeros(2), {}, "make_batch is a function"),
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
        memfit.tune(model(), given, budget="1GiB", **options)


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
