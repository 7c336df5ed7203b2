"""What each proposer of plans earns: the search with all of them, and with each one left out.

    python benchmarks/ablation.py [--leave-out] [--json FILE] [NAME ...]

For each profile: the mean overhead over 64 budgets, evenly between the smallest peak and the plain one; the smallest
peak; the mean gap to the lower bound; and the CPU seconds of a first plan() and of a first frontier(). Profiles are the
five families of ``tests/planning/model_families.py`` and those in ``benchmarks/profiles``, measured on an H200.
Budgets and figures of the baseline (the planner before it was divided into stages) come from the results file.

With ``--leave-out``, each proposer of `memfit.planning.search.PROPOSERS` is left out in turn. What it earns is how many
points of the plain step the overhead rises on average, and by how many percent the smallest peak does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rich.console import Console
from rich.table import Table
from tests.planning.model_families import FAMILIES

import memfit
from memfit.planning.planner import frontier, plan
from memfit.planning.search import PROPOSERS, Exploration, explored
from memfit.planning.step import Step

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "planner-ablation.json"
NUM_BUDGETS = 64


def profiles() -> dict[str, Callable[[], memfit.ModelProfile]]:
    """Return the profiles by name; those of the H200 begin with ``h200/``."""
    found: dict[str, Callable[[], memfit.ModelProfile]] = {**FAMILIES}
    for path in sorted((HERE / "profiles").glob("*.json.gz")):
        found[f"h200/{path.name.removesuffix('.json.gz')}"] = lambda path=path: memfit.ModelProfile.load(path)
    return found


def overheads(exploration: Exploration, budgets: Sequence[int], step_seconds: float) -> list[float]:
    """Return the overhead at each budget in percent; below the smallest peak, that of the smallest plan."""
    plans = exploration.frontier
    fitting = (next((plan for plan in plans if plan.peak_bytes <= budget), plans[-1]) for budget in budgets)
    return [100 * plan.added_seconds / step_seconds for plan in fitting]


def measured(profile: memfit.ModelProfile, baseline: dict[str, float], *, leave_out: bool) -> dict[str, object]:
    """Return the figures of one profile."""
    step = Step(profile)
    start = time.process_time()
    exploration = explored(step)
    seconds = time.process_time() - start
    low = baseline.get("smallest_peak_bytes") or exploration.frontier[-1].peak_bytes
    high = baseline.get("plain_peak_bytes") or exploration.frontier[0].peak_bytes
    budgets = [low + (high - low) * number // (NUM_BUDGETS - 1) for number in range(NUM_BUDGETS)]
    found = overheads(exploration, budgets, profile.step_seconds)
    gaps = [
        overhead
        - 100 * step.time.at_least(exploration.bound.seconds(budget, exploration.likely_peaks)) / profile.step_seconds
        for overhead, budget in zip(found, budgets, strict=True)
    ]
    result: dict[str, object] = {
        "num_ops": len(profile.ops),
        "mean_overhead_percent": statistics.fmean(found),
        "smallest_peak_bytes": exploration.frontier[-1].peak_bytes,
        "mean_gap_percent": statistics.fmean(max(gap, 0.0) for gap in gaps),
        "explore_cpu_seconds": seconds,
        "plan_cpu_seconds": cpu_seconds(lambda twin: plan(twin, budget=int(1.05 * (low + high) / 2)), profile),
        "frontier_cpu_seconds": cpu_seconds(lambda twin: frontier(twin), profile),
    }
    if leave_out:
        result["left_out"] = {
            proposer.__name__: without(step, proposer, budgets, found, exploration)
            for proposer in dict.fromkeys(PROPOSERS)
        }
    return result


def cpu_seconds(act: Callable[[memfit.ModelProfile], object], profile: memfit.ModelProfile) -> float:
    """Return the CPU seconds of planning a profile that was never planned before."""
    twin = replace(profile)
    start = time.process_time()
    act(twin)
    return time.process_time() - start


def without(
    step: Step, proposer: object, budgets: Sequence[int], with_all: Sequence[float], exploration: Exploration
) -> dict[str, float]:
    """Return by how much the overhead and the smallest peak rise, and the CPU time falls, without one proposer."""
    start = time.process_time()
    others = explored(step, proposers=[other for other in PROPOSERS if other is not proposer])
    seconds = time.process_time() - start
    found = overheads(others, budgets, step.profile.step_seconds)
    smallest = exploration.frontier[-1].peak_bytes
    return {
        "overhead_points": statistics.fmean(found) - statistics.fmean(with_all),
        "smallest_peak_percent": 100 * (others.frontier[-1].peak_bytes / smallest - 1),
        "cpu_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what each proposer of plans earns.")
    parser.add_argument("names", nargs="*", help="the profiles; all of them unless given")
    parser.add_argument("--leave-out", action="store_true", help="also leave out each proposer in turn")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    baseline = json.loads(RESULTS.read_text())["baseline"] if RESULTS.exists() else {}
    found = {}
    for name, make in profiles().items():
        if arguments.names and name not in arguments.names:
            continue
        found[name] = measured(make(), baseline.get(name, {}), leave_out=arguments.leave_out)
        print(name, {key: value for key, value in found[name].items() if key != "left_out"}, flush=True)
    show(found, baseline)
    if arguments.json:
        arguments.json.write_text(json.dumps({"baseline": baseline, "now": found}, indent=1) + "\n")


def markdown(results: dict) -> str:
    """Return the tables of docs/results/planning.md."""
    baseline, found = results["baseline"], results["now"]
    lines = [
        "## What each proposer of plans earns",
        "",
        f"`benchmarks/ablation.py --leave-out`. Overheads are means over {NUM_BUDGETS} budgets, evenly between the",
        "smallest and the plain peak. Before is the planner before it had stages. Profiles called h200 were",
        "measured on an H200; the others are built by `tests/planning/model_families.py`.",
        "",
        "| profile | ops | overhead | before | smallest peak, change | gap to the bound | CPU of the search | before |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in found.items():
        before = baseline[name]
        lines.append(
            f"| {name} | {row['num_ops']:,} | {row['mean_overhead_percent']:.2f}% "
            f"| {before['mean_overhead_percent']:.2f}% "
            f"| {row['smallest_peak_bytes'] / before['smallest_peak_bytes'] - 1:+.2%} | {row['mean_gap_percent']:.2f}% "
            f"| {row['explore_cpu_seconds']:.2f} s | {before['explore_cpu_seconds']:.2f} s |"
        )
    proposers = list(next(iter(found.values()))["left_out"])
    lines += [
        "",
        "With one proposer left out: points of overhead more, and percent by which the smallest peak rises.",
        "",
        "| profile | " + " | ".join(f"`{name}`" for name in proposers) + " |",
        "|---|" + "---:|" * len(proposers),
    ]
    for name, row in found.items():
        cells = [row["left_out"][proposer] for proposer in proposers]
        shown = (f"{each['overhead_points']:.2f} / {each['smallest_peak_percent']:.1f}%" for each in cells)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    rows = [row["left_out"] for row in found.values()]
    means = (statistics.fmean(row[proposer]["overhead_points"] for row in rows) for proposer in proposers)
    lines.append(f"| mean | {' | '.join(f'{mean:.2f}' for mean in means)} |")
    return "\n".join(lines)


def show(found: dict, baseline: dict) -> None:
    console = Console(width=160)
    table = Table("profile", "ops", "overhead", "baseline", "smallest peak", "gap", "plan()", "baseline", "frontier()")
    for name, row in found.items():
        before = baseline.get(name)
        peak = "" if before is None else f"{row['smallest_peak_bytes'] / before['smallest_peak_bytes'] - 1:+.2%}"
        table.add_row(
            name,
            f"{row['num_ops']:,}",
            f"{row['mean_overhead_percent']:.3f} %",
            "" if before is None else f"{before['mean_overhead_percent']:.3f} %",
            peak,
            f"{row['mean_gap_percent']:.2f} %",
            f"{row['plan_cpu_seconds']:.2f} s",
            "" if before is None else f"{before['explore_cpu_seconds']:.2f} s",
            f"{row['frontier_cpu_seconds']:.2f} s",
        )
    console.print(table)
    left_out = {name: row["left_out"] for name, row in found.items() if "left_out" in row}
    if left_out:
        table = Table("left out", *left_out, "mean", title="Points of overhead, and % of the smallest peak, without it")
        for name in next(iter(left_out.values())):
            rows = [row[name] for row in left_out.values()]
            cells = [f"{row['overhead_points']:.3f} / {row['smallest_peak_percent']:.1f}" for row in rows]
            mean = statistics.fmean(row["overhead_points"] for row in rows)
            table.add_row(name, *cells, f"{mean:.3f}")
        console.print(table)


if __name__ == "__main__":
    main()
