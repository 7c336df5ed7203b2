"""The README's example is run, and its numbers are those of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COLUMNS = ("llama-2048", "llama-4096", "gpt-2048")
WAYS = {
    "checkpoint every block": "torch: checkpoint every block",
    "checkpoint every 2nd block": "torch: checkpoint every 2nd block",
    "selective: save matmuls + attention": "torch: selective, save matmuls + attention",
    "torchtitan's selective rule": "torchtitan: selective, every 2nd matmul",
}


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(example, "README.md", "exec"), names)
    model = names["model"]
    assert all(parameter.grad is not None for parameter in model.parameters())


def rows_of(label: str) -> list[list[str]]:
    """Return the numbers in the rows of that name, table by table."""
    rows = [line for line in README.splitlines() if line.startswith(f"| {label} |")]
    return [[cell.strip(" *×") for cell in row.split("|")[2:-1]] for row in rows]


def rows_in(path: str, model: str) -> dict[str, dict[str, Any]]:
    """Return what was measured of all ways in a file, with the host's memory where it has that."""
    results = json.loads((ROOT / "benchmarks/results" / path).read_text())["models"][model]
    return {line["way"]: line for line in results.get("offloading", results)["rows"]}


@pytest.mark.parametrize("label", WAYS)
def test_the_tables_show_the_committed_results(label: str) -> None:
    for shown, ending in zip(rows_of(label), ("", "-offloading"), strict=True):
        expected = []
        for model in COLUMNS:
            rows = rows_in(f"frontier-h200/{model}{ending}.json", model)
            expected += [rows[way]["ratio"] for way in (WAYS[label], f"memfit at the peak of ({WAYS[label]})")]
        assert shown == [f"{ratio:.3f}" for ratio in expected]


def test_offloading_everything_is_beside_the_smallest_plans_of_the_committed_results() -> None:
    (shown,) = rows_of("`save_on_cpu`")
    smallest = {
        "llama-2048": ("frontier-h200-other-runs/llama-2048-beside-save-on-cpu.json", "memfit at 8.68 GiB"),
        "llama-4096": ("frontier-h200/llama-4096-offloading.json", "memfit at 6.69 GiB"),
        "gpt-2048": ("frontier-h200-other-runs/gpt-2048-beside-save-on-cpu.json", "memfit at 8.42 GiB"),
    }
    expected, above = [], {}
    for model in COLUMNS:
        path, ours = smallest[model]
        rows = rows_in(path, model)
        theirs, mine = rows["torch: save_on_cpu"], rows[ours]
        expected += [theirs["ratio"], mine["ratio"]]
        above[model] = mine["peak_bytes"] - theirs["peak_bytes"]
    assert shown == [f"{ratio:.2f}" for ratio in expected]
    assert above["llama-4096"] == 0
    larger = (
        f"{above['llama-2048'] / 1e6:.0f} MB larger on the Llama of width 2048, and {above['gpt-2048'] >> 10} KB on"
    )
    assert larger in README


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []
