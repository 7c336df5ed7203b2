"""``memfit fit``: the code it prints is complete, torch's checkpointing is measured beside it, stages are named."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.running import memfit
from typer.testing import CliRunner

from memfit.cli.main import app
from memfit.cli.python_code import python_code
from memfit.cli.target import load_target

TRAIN = """
import torch
from torch import nn

def loss_of(output, targets):
    return nn.functional.mse_loss(output, targets)

def build(width=8):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    RETURNS
"""
TUPLE = (
    "return model, torch.ones(64, width), lambda output: output.square().mean(), torch.optim.SGD(model.parameters())"
)
DICT = "return {'model': model, 'batch': torch.ones(64, width), 'loss': loss_of, 'targets': torch.zeros(64, width)}"
BUDGET = ["--arg", "width=16", "--budget", "60kB"]


def printed_code(shown: str) -> str:
    """Return the code at the end of what ``memfit fit`` printed."""
    code = shown.partition("The same in Python\n")[2]
    return "\n".join(line for line in code.splitlines() if not line.startswith("Wrote"))


@pytest.mark.parametrize("returns", [TUPLE, DICT], ids=["tuple", "dict"])
@pytest.mark.parametrize("is_saved", [False, True], ids=["printed", "saved"])
def test_the_code_that_it_prints_fits_the_same_step(
    target_file: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: str, is_saved: bool
) -> None:
    name = f"train_{'saved' if is_saved else 'printed'}_{len(returns)}"
    path = target_file(TRAIN.replace("RETURNS", returns), f"{name}.py")
    options = ["-o", str(tmp_path / "plan.json"), "--html", str(tmp_path / "page.html")] if is_saved else []
    code, shown, errors = memfit("fit", f"{path}:build", *BUDGET, *options)
    assert (code, errors) == (0, "")
    source = printed_code(shown)
    assert ("Plan.load" in source) is is_saved
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {}
    exec(compile(source, "printed", "exec"), names)
    model = names["model"] if returns is TUPLE else names["training_step"]["model"]  # type: ignore[index]
    assert isinstance(model, torch.nn.Module)
    # The plan is applied: forwards are wrapped.
    assert any("forward" in vars(module) for module in model.modules())
    if not is_saved:
        assert names["fitted"].plan.budget_bytes == 60_000  # type: ignore[attr-defined]
        assert names["fitted"].verification.gradients_equal  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["train-v2.py", "2024.py", "class.py", "profile.py", "memfit.py", "train.v2.py"])
def test_the_code_that_it_prints_finds_a_file_that_no_import_statement_does(
    target_file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = target_file(TRAIN.replace("RETURNS", TUPLE), name)
    loaded = load_target(f"{path}:build", ["width=16"])
    code = python_code(
        f"{path}:build", ["width=16"], num_entries=loaded.num_entries, budgets={"budget": "60kB"}, plan_file=None
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    names: dict[str, object] = {}
    exec(compile(code, "printed", "exec"), names)
    assert names["fitted"].plan.budget_bytes == 60_000  # type: ignore[attr-defined]


def test_torchs_checkpointing_is_measured_in_the_same_rounds(target_file: Callable[[str], str], tmp_path: Path) -> None:
    target, page = f"{target_file(TRAIN.replace('RETURNS', TUPLE))}:build", tmp_path / "page.html"
    code, shown, _ = memfit("fit", target, *BUDGET, "--compare", "--json", "--html", str(page))
    assert code == 0
    plain, planned, checkpointed = json.loads(shown)["comparison"]
    assert [row["label"] for row in (plain, planned, checkpointed)] == [
        "plain step",
        "memfit",
        "torch: checkpoint every block",
    ]
    assert plain["overhead"] == 0.0
    assert all(row["gradients_equal"] for row in (plain, planned, checkpointed))
    assert planned["peak_bytes"] <= 60_000
    assert checkpointed["peak_bytes"] < plain["peak_bytes"]
    assert "torch: checkpoint every block" in page.read_text(encoding="utf-8")


def test_the_engine_in_use_is_printed_and_why(
    target_file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_NATIVE", "0")
    from memfit.runtime.native.native_build import why_not_native

    assert why_not_native() == "MEMFIT_NATIVE=0"
    monkeypatch.setenv("MEMFIT_NATIVE", "1")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why_not_native() == "no C++ compiler 'no-such-compiler' was found: install one, or set CXX"


def test_stages_are_lines_on_standard_error_where_that_is_no_terminal(target_file: Callable[[str], str]) -> None:
    target = f"{target_file(TRAIN.replace('RETURNS', TUPLE))}:build"
    result = CliRunner().invoke(app, ["fit", target, *BUDGET, "--compare"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    stages = [line.removeprefix("memfit: ") for line in result.stderr.splitlines()]
    assert stages == [
        "profiling the plain step",
        "planning",
        "comparing gradients and peaks",
        "timing",
        "comparing methods",
        "timing",
    ]
    assert "engine" in result.stdout
    assert "torch: checkpoint every block" in result.stdout


@pytest.mark.filterwarnings("ignore:the plan changes nothing")
def test_a_model_without_blocks_has_nothing_to_compare(target_file: Callable[[str], str]) -> None:
    source = """
    import torch
    from torch import nn

    def build():
        return nn.Linear(8, 8), torch.ones(64, 8), lambda output: output.square().mean()
    """
    code, _, errors = memfit("fit", f"{target_file(source)}:build", "--budget=1GiB", "--compare")
    assert code == 2
    assert "--compare checkpoints every repeated block, and Linear has none; leave it out" in errors


def report_in(page: Path) -> dict[str, Any]:
    """Return the data that a page holds."""
    data = page.read_text(encoding="utf-8").partition('id="report-data">')[2].partition("</script>")[0]
    return dict(json.loads(data))


def test_several_batches_have_a_plan_each_in_the_table_on_the_page_and_in_the_code(
    target_file: Callable[[str], str], tmp_path: Path
) -> None:
    returns = "return {'model': model, 'batches': [torch.ones(n, 16) for n in (16, 64)], 'loss': torch.sum}"
    target, page = f"{target_file(TRAIN.replace('RETURNS', returns))}:build", tmp_path / "page.html"
    options = ["-o", str(tmp_path / "plan.json"), "--html", str(page)]
    code, shown, errors = memfit("fit", target, *BUDGET, *options)
    assert (code, errors) == (0, "")
    assert "the plans by size" in " ".join(shown.split())
    assert re.search(r"^\s+64\s+\S+ KiB", shown, re.MULTILINE)
    # The saved plan is that for the largest size, so that the code fits all sizes again.
    assert "fitted = memfit.fit(**training_step, budget='60kB')" in shown
    sizes = report_in(page)["sizes"]
    assert sizes["rows"][-1][0] == sizes["chosen_size"] == 64
    assert all(row[1] <= 60_000 for row in sizes["rows"])
    code, _, errors = memfit("fit", target, *BUDGET, "--compare")
    assert (code, "--compare measures one batch" in errors) == (2, True)
    code, _, errors = memfit("profile", target)
    assert (code, "return the largest as 'batch' here" in errors) == (2, True)


@pytest.mark.filterwarnings("ignore:the plan changes nothing")
def test_tune_draws_every_size_that_was_tried(target_file: Callable[[str], str], tmp_path: Path) -> None:
    returns = "return model, lambda size: torch.ones(size, width), torch.sum"
    target, page = f"{target_file(TRAIN.replace('RETURNS', returns))}:build", tmp_path / "page.html"
    code, shown, _ = memfit("tune", target, "--budget=1MiB", "--sizes=8,16", "--html", str(page), "--json")
    assert code == 0
    table, sizes = json.loads(shown)["table"], report_in(page)["sizes"]
    assert [row["size"] for row in table] == [row[0] for row in sizes["rows"]] == [8, 16]
    assert [row["throughput"] for row in table] == [row[2] for row in sizes["rows"]]
    assert sizes["budget_bytes"] == 2**20
