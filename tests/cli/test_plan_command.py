"""``memfit plan``: what it prints, saves and returns, and one line for each mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memfit import Budget, Full, InfeasibleBudgetError, MemfitError, PlanFileError, build_checkpoint_plan
from memfit.cli.main import app
from memfit.layers.examples import gpt_layers
from memfit.layers.layer_files import load_layer_plan, save_layers

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "layers.json")


def memfit(*arguments: str, columns: int = 80) -> tuple[int, str, str]:
    """Run the command in this process and return the exit code, standard output and standard error."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)}, prog_name="memfit")
    return result.exit_code, result.stdout, result.stderr


def test_a_budget_is_planned_and_shown_as_a_table_with_a_summary() -> None:
    code, shown, errors = memfit("plan", EXAMPLE, "--budget", "1GiB")
    assert (code, errors) == (0, "")
    assert "layers.json: budget 1GiB" in shown
    assert "peak        1014.0 MiB instead of 3.05 GiB (67.5% less)" in shown
    assert "recompute   1.44 TFLOP, 66.3% of the forward pass" in shown
    assert "layers      48 of 51 recomputed" in shown
    assert "optimality  no plan within this budget costs fewer FLOPs" in shown
    rows = [line.split() for line in shown.splitlines() if "MiB" in line and "FLOP" in line]
    assert len(rows) == 51
    assert rows[0] == ["0", "embedding", "Embedding", "12.0", "MiB", "6.29", "MFLOP", "recompute"]
    assert rows[46] == ["46", "blocks.11.attention", "Attention", "60.4", "MiB", "51.5", "GFLOP", "save"]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_the_terminal(columns: int) -> None:
    _, shown, _ = memfit("plan", EXAMPLE, "--strategy", "sqrt", columns=columns)
    assert max(len(line) for line in shown.splitlines()) <= columns
    assert "…" not in shown


@pytest.mark.parametrize(
    ("written", "num_dropped"),
    [
        ("none", 0),
        ("full", 51),
        ("attention", 12),
        ("ffn", 12),
        ("sqrt", 45),
        ("every-nth:2", 26),
        ("largest:4", 4),
        ("selective:0.5", 26),
        ("SELECTIVE:1/4", 13),
    ],
)
def test_every_strategy_can_be_written(written: str, num_dropped: int) -> None:
    code, shown, _ = memfit("plan", EXAMPLE, "--strategy", written, "--json")
    assert code == 0
    assert len(json.loads(shown)["checkpointed_layers"]) == num_dropped


def test_json_is_one_object_with_the_whole_plan() -> None:
    code, shown, _ = memfit("plan", EXAMPLE, "--budget", "1GiB", "--json")
    plan = build_checkpoint_plan(gpt_layers(), Budget.from_bytes(2**30))
    assert code == 0
    assert json.loads(shown) == {
        "format": "memfit-layer-plan",
        "version": 1,
        "strategy": "budget 1GiB",
        "forward_flops": build_checkpoint_plan(gpt_layers(), Full()).total_recompute_flops,
        "peak_memory_bytes": plan.saved_activation_bytes + plan.total_activation_memory_bytes,
        "total_activation_memory_bytes": plan.total_activation_memory_bytes,
        "total_recompute_flops": plan.total_recompute_flops,
        "dropped_activation_bytes": plan.dropped_activation_bytes,
        "saved_activation_bytes": plan.saved_activation_bytes,
        "optimality_gap": 0.0,
        "checkpointed_layers": list(plan.checkpointed_layers),
        "saved_layers": list(plan.saved_layers),
    }


def test_a_plan_is_saved_where_asked(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    code, shown, _ = memfit("plan", EXAMPLE, "--strategy", "full", "-o", str(target))
    assert code == 0
    assert f"Wrote {target}." in shown.replace("\n", "")
    assert load_layer_plan(target) == build_checkpoint_plan(gpt_layers(), Full())


def test_a_long_list_is_cut_in_the_table_and_whole_in_json(tmp_path: Path) -> None:
    path = tmp_path / "long.json"
    save_layers(gpt_layers(num_blocks=100), path)
    _, shown, _ = memfit("plan", str(path), "--strategy", "full")
    assert "… and 343 layers more; --json has all" in shown
    _, document, _ = memfit("plan", str(path), "--strategy", "full", "--json")
    assert len(json.loads(document)["checkpointed_layers"]) == 403


def test_an_empty_list_gives_an_empty_plan(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    save_layers([], path)
    code, shown, _ = memfit("plan", str(path), "--budget", "1MiB")
    assert code == 0
    assert "0 of 0 recomputed" in shown


def test_an_infeasible_budget_exits_1_and_names_the_minimum() -> None:
    code, shown, errors = memfit("plan", EXAMPLE, "--budget", "1MiB")
    assert (code, shown) == (1, "")
    assert errors == (
        "error: the smallest budget for these layers is 785.3 MiB (823410688 bytes), which the largest layer alone "
        "needs when it is recomputed; the given one is 1.00 MiB (1048576 bytes)\n"
        "hint: the smallest budget is --budget 785.3MiB\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([EXAMPLE], "error: give exactly one of --strategy and --budget; got neither"),
        ([EXAMPLE, "--strategy", "full", "--budget", "1GiB"], "error: give exactly one of .* got both"),
        (
            [EXAMPLE, "--strategy", "half"],
            "error: 'half' is not a strategy; write one of none, full, .*selective:RATIO",
        ),
        ([EXAMPLE, "--strategy", "every-nth"], "error: 'every-nth' is not a strategy"),
        ([EXAMPLE, "--strategy", "every-nth:x"], "error: 'every-nth:x' is not a strategy"),
        ([EXAMPLE, "--strategy", "selective:1/0"], "error: 'selective:1/0' is not a strategy"),
        ([EXAMPLE, "--strategy", "full:3"], "error: 'full:3' is not a strategy"),
        ([EXAMPLE, "--strategy", "every-nth:0"], "error: n of EveryNthLayer must be .* got 0"),
        ([EXAMPLE, "--strategy", "selective:1.5"], "error: checkpoint_ratio must be a number from 0 to 1.* got 1.5"),
        ([EXAMPLE, "--budget", "2"], "error: '2' is not a size; write a number and a unit"),
        (["missing.json", "--strategy", "full"], "error: missing.json: cannot be read: No such file or directory"),
        ([EXAMPLE, "--strategy", "full", "-o", "/no/such/folder/plan.json"], "error: .*plan.json: cannot be written"),
        ([__file__, "--strategy", "full"], "error: .*: line 1, column 3: not JSON"),
    ],
)
def test_wrong_use_exits_2_with_one_line(arguments: list[str], message: str) -> None:
    code, shown, errors = memfit("plan", *arguments)
    assert (code, shown) == (2, "")
    assert errors.count("\n") == 1
    assert re.match(message, errors)


def test_a_file_of_another_format_is_told_the_formats_there_are(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"format": "other", "version": 1}')
    code, _, errors = memfit("plan", str(path), "--strategy", "full")
    assert code == 2
    assert "\"format\" must be one of memfit-layers, memfit-profile; got 'other'" in errors


@pytest.mark.parametrize(
    ("file", "code", "error"), [(EXAMPLE, 1, InfeasibleBudgetError), ("missing.json", 2, PlanFileError)]
)
def test_debug_shows_the_trace_and_exits_the_same(file: str, code: int, error: type[MemfitError]) -> None:
    arguments = ["plan", file, "--budget", "1MiB"]
    assert memfit(*arguments)[0] == code
    found, shown, errors = memfit("--debug", *arguments)
    assert (found, shown) == (code, "")
    assert errors.startswith("Traceback (most recent call last):\n")
    assert errors.splitlines()[-1].startswith(f"memfit.errors.{error.__name__}: ")


def test_an_error_as_json_is_one_object_that_names_the_minimum() -> None:
    code, shown, errors = memfit("plan", EXAMPLE, "--budget", "1MiB", "--json")
    (told,) = json.loads(shown).values()
    assert code == 1
    assert errors.startswith(f"error: {told['message']}\n")
    assert told == {"type": "InfeasibleBudgetError", "message": told["message"], "minimum_bytes": 823410688}
    code, shown, _ = memfit("plan", "missing.json", "--strategy", "full", "--json")
    assert code == 2
    assert json.loads(shown) == {
        "error": {"type": "PlanFileError", "message": "missing.json: cannot be read: No such file or directory"}
    }


def test_the_script_exits_with_the_same_codes_and_no_trace() -> None:
    def script(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from memfit.cli.main import run; run()", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    infeasible = script("plan", EXAMPLE, "--budget", "1MiB")
    assert infeasible.returncode == 1
    assert infeasible.stderr.startswith("error: the smallest budget for these layers is 785.3 MiB")
    assert "Traceback" not in infeasible.stderr
    assert script("plan", EXAMPLE, "--strategy", "full", "--json").returncode == 0
    assert script("plan", "--nonsense").returncode == 2
    assert "Traceback" in script("--debug", "plan", EXAMPLE, "--budget", "1MiB").stderr
