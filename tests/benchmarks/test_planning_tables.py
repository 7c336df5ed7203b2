"""The tables of planning times and gaps in the docs are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

from planning import markdown

ROOT = Path(__file__).parent.parent.parent


def test_the_page_shows_the_committed_results() -> None:
    results = json.loads((ROOT / "benchmarks/results/planning.json").read_text(encoding="utf-8"))
    assert markdown(results) in (ROOT / "docs/results/planning.md").read_text(encoding="utf-8")
