"""Writes the tables of docs/performance.md from the results of frontier.py.

python benchmarks/frontier_tables.py benchmarks/results/frontier-h200/*.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

GIB = 2**30


def table(name: str, model: dict[str, Any]) -> str:
    """Return, for each way of torch, what it takes and what memfit takes at its peak; then memfit's own frontier."""
    rows = {row["way"]: row for row in model["rows"]}
    lines = [
        f"### {name}",
        "",
        f"{model['num_ops']} ops, profiled in {model['profiling_seconds']:.1f} s. Plain step: "
        f"{rows['plain']['median_ms']:.0f} ms, {gib(rows['plain'])} GiB of activations; run again: "
        f"{rows['plain again']['ratio']:.3f}×.",
        "",
        "| way | time | activations GiB | memfit at its peak | activations GiB |",
        "|---|---:|---:|---:|---:|",
    ]
    for way, row in rows.items():
        if way.startswith("torch"):
            ours = rows.get(f"memfit at the peak of ({way})") or rows.get(f"memfit at the peak of [{way}]")
            ours_text = f"{ours['ratio']:.3f}× | {gib(ours)}" if ours else "cannot be met | "
            lines.append(f"| {way} | {row['ratio']:.3f}× | {gib(row)} | {ours_text} |")
    own = [row for way, row in rows.items() if way.startswith("memfit at") and "peak of" not in way]
    points = " · ".join(f"{row['ratio']:.3f}× at {gib(row)}" for row in own)
    return "\n".join([*lines, "", f"memfit's own frontier: {points}.", ""])


def gib(row: dict[str, Any]) -> str:
    return f"{row['activation_peak_bytes'] / GIB:.1f}"


def main() -> None:
    for path in sys.argv[1:]:
        results = json.loads(Path(path).read_text())
        for name, model in results["models"].items():
            print(table(name, model))


if __name__ == "__main__":
    main()
