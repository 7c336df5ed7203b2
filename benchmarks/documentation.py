"""Writes what the documentation shows of the committed results: parts of docs/performance.md, and docs/results.

    python benchmarks/documentation.py

In docs/performance.md, what stands between two markers of one name is replaced; the rest is left as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import planning
from frontier_results import load
from frontier_tables import page_of, predictions, summary

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks/results", ROOT / "docs"


def written() -> Mapping[Path, str]:
    """Return the content of each file that shows results."""
    models = load(sorted((RESULTS / "frontier-h200").glob("*.json")))
    planning_results = _read("planning.json")
    parts = {
        "summary": summary(models),
        "predictions": predictions(models),
        "engine": _engine(_read("engine-h200.json")),
        "planning": _planning_times(planning_results),
    }
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    for name, part in parts.items():
        page = replaced(page, name, part)
    planning_page = (
        f"# Planning\n\nWritten by `benchmarks/documentation.py`.\n\n{planning.markdown(planning_results)}\n"
    )
    return {
        DOCS / "performance.md": page,
        DOCS / "results/planning.md": planning_page,
        **{DOCS / f"results/{model.name}.md": page_of(model, DOCS / "images") for model in models},
    }


def replaced(page: str, name: str, part: str) -> str:
    """Return ``page`` with ``part`` between the markers of that ``name``."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page must have, once each and in this order, the lines {begin!r} and {end!r}")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{part.strip()}\n\n{end}{rest.partition(end)[2]}"


def _engine(results: Mapping[str, Any]) -> str:
    lines = [f"{results['machine']}. {results['note']}", ""]
    lines += ["| step | method | time | activations |", "|---|---|---:|---:|"]
    for size, rows in results["sizes"].items():
        lines += [
            f"| {size} | {row['method']} | {row['ratio']:.2f}× | {row['activation_peak_bytes'] / 2**20:,.0f} MiB |"
            for row in rows
        ]
    return "\n".join(lines)


def _planning_times(results: Mapping[str, Any]) -> str:
    rows = results["times"]["llama"]
    return "\n".join(
        [
            f"{results['machine']}. [Gaps and smallest peaks](results/planning.md)",
            "",
            f"| ops of a llama | {' | '.join(format(row['num_ops'], ',') for row in rows)} |",
            "|---|" + "---:|" * len(rows),
            f"| plan() of a new profile | {' | '.join(format(row['plan_seconds'], '.1f') + ' s' for row in rows)} |",
        ]
    )


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def main() -> None:
    (DOCS / "results").mkdir(exist_ok=True)
    for path, content in written().items():
        path.write_text(content, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
