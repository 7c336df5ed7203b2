"""The README's example is run, and its numbers are those of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path

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


@pytest.mark.parametrize("label", WAYS)
def test_the_table_shows_the_committed_results(label: str) -> None:
    (row,) = [line for line in README.splitlines() if line.startswith(f"| {label} |")]
    shown = [cell.strip(" *×") for cell in row.split("|")[2:-1]]
    expected = []
    for model in COLUMNS:
        results = json.loads((ROOT / f"benchmarks/results/frontier-h200/{model}.json").read_text())
        ratios = {line["way"]: line["ratio"] for line in results["models"][model]["rows"]}
        expected += [ratios[WAYS[label]], ratios[f"memfit at the peak of ({WAYS[label]})"]]
    assert shown == [f"{ratio:.3f}" for ratio in expected]


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []
