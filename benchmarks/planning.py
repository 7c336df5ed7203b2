"""How long planning takes and how far plans can be from the fastest possible.

    python benchmarks/planning.py [--json benchmarks/results/planning.json]

Times are CPU seconds of one whole call of plan() on a profile that was never planned before, the best of several, for
Llamas of 500 to 20,000 ops (forward and backward) and for chains whose blocks are all alike. Later calls on the same
profile take milliseconds. Where plans may offload, over a link as an H200 has it, the first such call takes longer:
that comes on top. The growth exponent is the slope from one size to the next: 1 is linear. Gaps are what frontier()
reports at eight peaks between the smallest and the plain step's, and at the smallest, as a share of the step, for five
families at real sizes (``tests/planning/model_families.py``); and on average what plan() reports for 64 budgets between
these, which need not be the peak of any plan. Minimums are what the error for a budget that is too small reports for
each: the smallest peak found, the one that no plan can stay below, and the CPU seconds until then.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from rich.console import Console
from rich.table import Table
from tests.planning.model_families import FAMILIES, chain, llama

import memfit
from memfit.environment import processor_name
from memfit.graph.model_profile import Link
from memfit.planning.known_steps import known_step
from memfit.planning.planner import frontier, plan
from memfit.planning.simulate.simulator import judged
from memfit.planning.step import Step
from memfit.units import format_bytes

NUMS_OPS = (500, 1_000, 2_000, 5_000, 10_000, 20_000)
NUM_BUDGETS, NUM_BUDGETS_BETWEEN = 8, 64
LINK = Link(
    out_bytes_per_second=54e9,
    back_bytes_per_second=55e9,
    seconds_per_copy=13e-6,
    host_free_bytes=128 * 2**30,
    slowdown=0.02,
)


def llama_of(num_ops: int):
    """Return a Llama of about that many ops; a block has 45 of the forward pass, and as many of backward."""
    return llama(num_blocks=max(num_ops // 90, 1))


def chain_of(num_ops: int):
    return chain(num_layers=num_ops // 2)


def plan_seconds(profile: memfit.ModelProfile) -> tuple[float, float, float]:
    """Return the seconds of one plan halfway between the parameters and the plain peak, and of one simulation.

    And those that it takes to plan the same once more, with offloading. All are CPU seconds.
    """
    step = Step(profile)
    budget = (step.resident_bytes + judged(step, set()).peak_bytes) // 2
    everything = step.recomputed_of(set(step.plannable))
    planning, judging, offloading = [], [], []
    for _ in range(3 if len(profile.ops) <= 5_000 else 1):
        # What is found out about a profile is kept with it: a twin of it is planned from nothing.
        unknown = replace(profile, link=LINK)
        start = time.process_time()
        plan(unknown, budget=budget)
        planning.append(time.process_time() - start)
        start = time.process_time()
        judged(step, everything)
        judging.append(time.process_time() - start)
        start = time.process_time()
        plan(unknown, budget=budget, host_budget="auto")
        offloading.append(time.process_time() - start)
    return min(planning), min(judging), min(offloading)


def measure_times() -> dict[str, list[dict[str, float]]]:
    results: dict[str, list[dict[str, float]]] = {}
    for label, make in (("llama", llama_of), ("chain", chain_of)):
        rows: list[dict[str, float]] = []
        for num_ops in NUMS_OPS:
            profile = make(num_ops)
            seconds, simulation_seconds, offloading_seconds = plan_seconds(profile)
            row = {
                "num_ops": len(profile.ops),
                "plan_seconds": seconds,
                "simulation_seconds": simulation_seconds,
                "offloading_seconds": offloading_seconds,
            }
            if rows:
                row["growth_exponent"] = math.log(seconds / rows[-1]["plan_seconds"]) / math.log(
                    row["num_ops"] / rows[-1]["num_ops"]
                )
            rows.append(row)
        results[label] = rows
    return results


def measure_gaps() -> dict[str, dict[str, object]]:
    results: dict[str, dict[str, object]] = {}
    for family, make in FAMILIES.items():
        profile = make()
        points = frontier(profile, points=NUM_BUDGETS + 2)
        high, low = points[0].peak_bytes, points[-1].peak_bytes
        budgets = [low + (high - low) * number // NUM_BUDGETS_BETWEEN for number in range(NUM_BUDGETS_BETWEEN)]
        gaps = [plan(profile, budget=budget).optimality_gap for budget in budgets]
        results[family] = {
            "mean_gap_of_budgets": statistics.fmean(gaps),
            "plain_peak_bytes": points[0].peak_bytes,
            "smallest_peak_bytes": points[-1].peak_bytes,
            "points": [
                {"peak_bytes": p.peak_bytes, "overhead": p.overhead, "optimality_gap": p.plan.optimality_gap}
                for p in points[1:]
            ],
        }
    return results


def measure_minimums() -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    for family, make in FAMILIES.items():
        profile = make()
        start = time.process_time()
        try:
            plan(profile, budget=1)
        except memfit.InfeasibleBudgetError as error:
            minimum_bytes = error.minimum_bytes
        seconds = time.process_time() - start
        exploration = known_step(profile).exploration()
        results[family] = {
            "minimum_bytes": minimum_bytes,
            "proven_bytes": exploration.least_peak_bytes,
            "seconds": seconds,
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Time plans into a budget and bound their distance from the best.")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = {
        "machine": f"{processor_name()}, one core, {platform.system()}",
        "versions": {
            "memfit": memfit.__version__,
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "scipy": version("scipy"),
        },
        "times": measure_times(),
        "gaps": measure_gaps(),
        "minimums": measure_minimums(),
    }
    show(results)
    print(markdown(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def markdown(results: dict) -> str:
    """Return the tables of docs/results/planning.md."""
    lines = [f"{results['machine']}, SciPy {results['versions']['scipy']}.", ""]
    for label, rows in results["times"].items():
        cells = [
            [f"ops of a {label}", *(f"{row['num_ops']:,}" for row in rows)],
            ["plan() of a new profile, CPU", *(f"{row['plan_seconds']:.2f} s" for row in rows)],
            ["additional CPU, where it may offload", *(f"{row['offloading_seconds']:.2f} s" for row in rows)],
        ]
        head, *body = ("| " + " | ".join(line) + " |" for line in cells)
        lines += [head, "|---|" + "---:|" * len(rows), *body, ""]
    num_points = max(len(row["points"]) for row in results["gaps"].values())
    lines += [
        "| optimality gap, from the largest peak to the smallest |" + " |" * num_points + " mean over 64 budgets |",
        "|---|" + "---:|" * (num_points + 1),
        *(
            f"| {family} | "
            + " | ".join(f"{point['optimality_gap']:.2%}" for point in row["points"])
            + f" | {row['mean_gap_of_budgets']:.2%} |"
            for family, row in results["gaps"].items()
        ),
        "",
        "| smallest peak | found | lower bound | above that | CPU |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {family} | {format_bytes(row['minimum_bytes'])} | {format_bytes(row['proven_bytes'])} "
            f"| {row['minimum_bytes'] / row['proven_bytes'] - 1:.2%} | {row['seconds']:.1f} s |"
            for family, row in results["minimums"].items()
        ),
    ]
    return "\n".join(lines)


def show(results: dict) -> None:
    console = Console()
    for label, rows in results["times"].items():
        title = f"{label} ({results['machine']})"
        table = Table("ops", "plan", "offloading", "one simulation", "growth exponent", title=title)
        for row in rows:
            growth = f"{row['growth_exponent']:.2f}" if "growth_exponent" in row else ""
            judging = f"{1000 * row['simulation_seconds']:.1f} ms"
            seconds = (f"{row[part]:.2f} s" for part in ("plan_seconds", "offloading_seconds"))
            table.add_row(f"{row['num_ops']:,}", *seconds, judging, growth)
        console.print(table)
    table = Table("family", "peak", "overhead", "optimality gap", title="Plans between the plain step and the smallest")
    for family, row in results["gaps"].items():
        for point in row["points"]:
            shares = f"{point['overhead']:.2%}", f"{point['optimality_gap']:.2%}"
            table.add_row(family, format_bytes(point["peak_bytes"]), *shares)
    console.print(table)


if __name__ == "__main__":
    main()
