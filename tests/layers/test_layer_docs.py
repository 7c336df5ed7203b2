"""What the documents on layers show is what happens."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from memfit import PlanFileError
from memfit.layers.layer_files import load_layers

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
FORMAT = (ROOT / "docs" / "layers-format.md").read_text(encoding="utf-8")


def block(text: str, language: str) -> str:
    """Return the first code block of ``language``."""
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found
    return found[1]


def test_the_guides_example_prints_what_the_guide_says() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block(GUIDE, "python"), {})
    first, second = printed.getvalue().splitlines()
    assert f"This prints `{first}` and `{second}`." in GUIDE


def test_the_formats_example_is_a_list_of_layers(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text(block(FORMAT, "json"))
    assert [layer.name for layer in load_layers(path)] == [None, "blocks.0.attention", "blocks.0.ffn"]


def test_the_error_shown_is_the_error_raised(tmp_path: Path) -> None:
    document = json.loads(block(FORMAT, "json"))
    document["layers"][1]["activation_size_bytes"] = "63 MB"
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(document))
    with pytest.raises(PlanFileError) as refused:
        load_layers(path)
    assert f"error: {str(refused.value).removeprefix(f'{tmp_path}/')}\n" in FORMAT


def test_the_table_of_times_is_the_benchmarks_last_result() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "layers.json").read_text())
    for label, row in results["strategies"].items():
        times = [1000 * seconds for seconds in row["seconds"].values()]
        assert f"| {label} | {times[0]:.1f} | {times[1]:.1f} | {times[2]:.0f} |" in GUIDE
    assert f"Python {results['versions']['python']},\nNumPy {results['versions']['numpy']}." in GUIDE
    assert f"planned in {1000 * results['binomial_sweep']['seconds']:.1f} ms" in GUIDE
    assert f"takes {1000 * results['import_seconds']:.0f} ms" in GUIDE
