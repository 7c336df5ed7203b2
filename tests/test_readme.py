"""The README's example is run, and its numbers are those of the committed results."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.running import memfit

from memfit.cli.target import load_target

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COLUMNS = ("llama-2048", "llama-4096", "gpt-2048")
METHODS = {
    "checkpoint every block": "torch: checkpoint every block",
    "checkpoint every 2nd block": "torch: checkpoint every 2nd block",
    "selective: save matmuls + attention": "torch: selective, save matmuls + attention",
    "torchtitan's selective rule": "torchtitan: selective, every 2nd matmul",
}
COMPILED = ("eager, save everything", "memfit, compiled blocks, chunked loss")


def test_the_example_runs_and_prints_what_is_shown() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "readme"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), names)
    model = names["model"]
    assert all(parameter.grad is not None for parameter in model.parameters())
    shown = README.partition("It prints, on a CPU:\n\n```\n")[2].partition("```")[0]
    # Times, and the losses of unseeded weights, differ from run to run.
    same = [line for line in shown.splitlines() if "time" not in line and "loss" not in line]
    assert [line for line in printed.getvalue().splitlines() if "time" not in line and "loss" not in line] == same


def rows_of(label: str) -> list[list[str]]:
    """Return the numbers in the rows of that name, table by table."""
    rows = [line for line in README.splitlines() if line.startswith(f"| {label} |")]
    return [[cell.strip(" *×") for cell in row.split("|")[2:-1]] for row in rows]


def rows_in(path: str, model: str) -> dict[str, dict[str, Any]]:
    """Return what was measured of all methods in a file, with the host's memory where it has that."""
    results = json.loads((ROOT / "benchmarks/results" / path).read_text())["models"][model]
    return {line["method"]: line for line in results.get("offloading", results)["rows"]}


@pytest.mark.parametrize("label", METHODS)
def test_the_tables_show_the_committed_results(label: str) -> None:
    for shown, ending in zip(rows_of(label), ("",), strict=True):
        expected = []
        for model in COLUMNS:
            rows = rows_in(f"frontier-h200/{model}{ending}.json", model)
            expected += [
                rows[method]["ratio"] for method in (METHODS[label], f"memfit at the peak of ({METHODS[label]})")
            ]
        assert shown == [f"{ratio:.3f}" for ratio in expected]


def test_the_compiled_plans_it_shows_are_measured_ones() -> None:
    results = json.loads((ROOT / "benchmarks/results/frontier-h200/llama-2048-compiled-plans.json").read_text())
    rows = results["models"]["llama-2048"]["compiled-plans"]["groups"]["chunked loss"]["rows"]
    measured = {(f"{row['activation_peak_bytes'] / 2**30:.1f} GiB", f"{row['ratio']:.3f}") for row in rows}
    shown = [(size, ratio) for label in COMPILED for size, ratio in rows_of(label)]
    assert len(shown) == 4
    assert set(shown) <= measured


def test_the_command_is_one_and_its_target_takes_the_argument() -> None:
    (command,) = re.findall(r"^memfit (fit .*)$", README, flags=re.MULTILINE)
    assert memfit(*shlex.split(command), "--help")[0] == 0
    target, argument = re.findall(r"(\S+:\S+) --arg (\S+)", command)[0]
    assert load_target(target, [argument]).num_entries == 2


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []
