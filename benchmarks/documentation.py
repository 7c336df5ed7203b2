"""Writes what the documentation shows of the committed results: parts of pages in docs, and docs/results.

    python benchmarks/documentation.py

In docs/performance.md, docs/lengths.md and docs/tune.md, what stands between two markers of one name is replaced; the
rest is left as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ablation
import architectures
import planning
from frontier_results import GIB, load
from frontier_tables import compiled_summary, page_of, predictions, summary

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks/results", ROOT / "docs"


def written() -> Mapping[Path, str]:
    """Return the content of each file that shows results."""
    models = load(sorted((RESULTS / "frontier-h200").glob("*.json")))
    planning_results = _read("planning.json")
    parts = {
        "summary": summary(models),
        "predictions": predictions(models),
        "compiled": compiled_summary(models),
        "trainer": _trainer(_read("trainer-h200.json")),
        "budgets on a GPU": _gpu_budgets(_read("gpu-budgets-h200.json")),
        "engine": _engine(_read("engine-h200.json")),
        "planning": _planning_times(planning_results),
    }
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    for name, part in parts.items():
        page = replaced(page, name, part)
    lengths_page = replaced(
        (DOCS / "lengths.md").read_text(encoding="utf-8"),
        "lengths",
        _lengths(_read("lengths-gpt-cpu.json"), _read("lengths-trainer-cpu.json")),
    )
    tune_page = replaced(
        (DOCS / "tune.md").read_text(encoding="utf-8"), "batch sizes", _batch_sizes(_read("batch-sizes-cpu.json"))
    )
    planning_page = (
        f"# Planning\n\nWritten by `benchmarks/documentation.py`.\n\n{planning.markdown(planning_results)}\n\n"
        f"{ablation.markdown(_read('planner-ablation.json'))}\n"
    )
    architectures_page = (
        "# Architectures\n\nWritten by `benchmarks/documentation.py`.\n\n"
        f"{architectures.markdown(_read('architectures.json'))}\n"
    )
    return {
        DOCS / "performance.md": page,
        DOCS / "lengths.md": lengths_page,
        DOCS / "tune.md": tune_page,
        DOCS / "results/architectures.md": architectures_page,
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
    seconds = (f"{row['plan_seconds']:.2f} s" for row in rows)
    return "\n".join(
        [
            f"{results['machine']}. [Gaps and smallest peaks](results/planning.md)",
            "",
            f"| ops of a llama | {' | '.join(format(row['num_ops'], ',') for row in rows)} |",
            "|---|" + "---:|" * len(rows),
            f"| plan() of a new profile, CPU | {' | '.join(seconds)} |",
        ]
    )


def _trainer(results: Mapping[str, Any]) -> str:
    plain, *others = results["rows"]
    lines = ["| method | highest peak of all steps | seconds per step | relative | losses differ by at most |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for row in [plain, *others]:
        distance = max(abs(one - other) for one, other in zip(row["losses"], plain["losses"], strict=True))
        lines.append(
            f"| {row['method']} | {max(row['peak_bytes']) / GIB:.1f} GiB | {row['seconds']:.3f} "
            f"({row['seconds_25']:.3f} to {row['seconds_75']:.3f}) | {row['seconds'] / plain['seconds']:.3f}× | "
            f"{distance:.1e} |"
        )
    return "\n".join([_software(results), "", *lines])


def _gpu_budgets(results: Mapping[str, Any]) -> str:
    lines = ["| model | plain | every block checkpointed | smallest plan | plans | most over budget | `profile()` |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    for row in results["rows"]:
        sizes = (f"{row[key] / GIB:.2f} GiB" for key in ("plain_bytes", "checkpointed_bytes", "smallest_bytes"))
        most = max(max(plan["peak_bytes"]) / plan["budget_bytes"] - 1 for plan in row["plans"])
        took = f"{row['profiling_seconds']:.1f} s ({row['profiling_seconds'] / row['plain_seconds']:.0f} steps)"
        lines.append(f"| {row['name']} | {' | '.join(sizes)} | {len(row['plans'])} | {most:+.2%} | {took} |")
    return "\n".join([_software(results), "", *lines])


def _software(results: Mapping[str, Any]) -> str:
    facts = results["environment"]
    return f"NVIDIA H200, torch {facts['torch']}, transformers {facts['transformers']}, Python {facts['Python']}."


def _lengths(of_gpt: Mapping[str, Any], of_trainer: Mapping[str, Any]) -> str:
    def mebibytes(num_bytes: int) -> str:
        return f"{num_bytes / 2**20:.2f} MiB"

    columns = (of_gpt, of_trainer)
    rows = {
        "steps": [format(each["num_steps"], ",") for each in columns],
        "lengths": [f"{each['shortest']} to {each['longest']}" for each in columns],
        "longest plain step": [mebibytes(each["longest_plain_bytes"]) for each in columns],
        "budget": [mebibytes(each["budget_bytes"]) for each in columns],
        "largest peak": [mebibytes(each["largest_peak_bytes"]) for each in columns],
        "steps above the budget": [str(each["num_over"]) for each in columns],
        "gradients that differ from the plain step's": [str(of_gpt["num_lengths_with_other_gradients"]), ""],
        "weights that differ from plain training's at the end": ["", str(of_trainer["num_different_weights"])],
        "host time before the first step of a length, at most": [
            f"{1e3 * of_gpt['most_seconds_before_first_step']:.1f} ms",
            "",
        ],
        "slower than by a plan for the length alone, predicted, at most": [
            f"{of_gpt['most_points_slower']:.1f} points ({of_gpt['num_lengths_compared']} lengths)",
            "",
        ],
        "`fit` took": [f"{each['fit_seconds']:.0f} s" for each in columns],
    }
    lines = ["| | GPT | Qwen3, transformers' Trainer |", "|---|---:|---:|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join([_machine(of_gpt), "", *lines])


def _batch_sizes(results: Mapping[str, Any]) -> str:
    lines = [
        "| | budget | chosen size | best of the grid | share of its throughput | peak, share of predicted | took |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, found in results["models"].items():
        share = f"{found['share_of_best']:.3f} ({found['share_of_best_25']:.3f} to {found['share_of_best_75']:.3f})"
        lines.append(
            f"| {name} | {found['budget_bytes'] / 2**20:.1f} MiB | {found['chosen_size']} | {found['best_size']} | "
            f"{share} | {found['peak_share_of_predicted']:.3f} | {found['tune_seconds']:.0f} s |"
        )
    return "\n".join([_machine(results), "", *lines])


def _machine(results: Mapping[str, Any]) -> str:
    facts = results["environment"]
    return f"{facts['Processor']}, torch {facts['torch']}, Python {facts['Python']}, one thread."


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
