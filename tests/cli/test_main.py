"""The command line as a whole: version, help, the demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import memfit
from memfit.cli.main import app
from memfit.layers.examples import gpt_layers
from memfit.layers.layer_files import load_layer_plan, load_layers


def test_version_prints_and_exits() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"memfit {memfit.__version__}\n")


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert {"demo", "fit", "profile", "plan", "frontier", "verify", "report"} <= set(result.stdout.split())
    assert "memfit fit memfit.models:gpt --arg layers=12 --budget 300MiB" in result.stdout


def test_no_command_shows_the_help_and_counts_as_wrong_use() -> None:
    assert CliRunner().invoke(app, []).exit_code == 2


@pytest.mark.parametrize("columns", [80, 120])
def test_the_layers_demo_compares_every_strategy_within_the_terminal(columns: int) -> None:
    result = CliRunner().invoke(app, ["demo", "--layers"], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines) <= columns
    rows = {line.split("  ")[1].strip(): line.split() for line in lines if " of 51" in line}
    assert list(rows) == [
        "none",
        "every-nth:2",
        "selective:0.5",
        "largest:4",
        "attention",
        "ffn",
        "sqrt",
        "full",
        "budget 1.5GiB",
    ]
    assert rows["full"] == ["full", "785.3", "MiB", "74.8%", "2.18", "TFLOP", "100.0%", "51", "of", "51"]
    assert rows["budget 1.5GiB"] == [
        "budget",
        "1.5GiB",
        "1.50",
        "GiB",
        "50.8%",
        "1.03",
        "TFLOP",
        "47.3%",
        "37",
        "of",
        "51",
    ]
    words = " ".join(result.stdout.split())
    assert "peak at 1.50 GiB instead of 3.05 GiB, for 47.3% of the forward pass computed again" in words
    assert "The cheapest other strategy that needs no more memory is sqrt, with 55.6%." in words


def test_the_layers_demo_writes_its_files_where_asked(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    result = CliRunner().invoke(app, ["demo", "--layers", "--out", str(out)])
    assert result.exit_code == 0
    assert load_layers(out / "layers.json") == gpt_layers()
    assert load_layer_plan(out / "plan.json").optimality_gap == 0.0


def test_the_layers_demo_as_json_has_every_plan() -> None:
    result = CliRunner().invoke(app, ["demo", "--layers", "--json"])
    plans = json.loads(result.stdout)["plans"]
    assert [plan["strategy"] for plan in plans][-2:] == ["full", "budget 1.5GiB"]
    assert len(plans[-2]["checkpointed_layers"]) == 51


@pytest.mark.parametrize("options", [[], ["--layers"]])
def test_a_folder_that_cannot_be_made_exits_2(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["demo", *options, "--out", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path / 'file'}: cannot be made a folder: ")
