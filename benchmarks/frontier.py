"""memfit's measured trade-off beside what a user would pick instead, on one GPU.

    python benchmarks/frontier.py [MODEL ...] [--json results.json]

For each eager way of torch its peak is measured first, and memfit is given exactly that peak as its budget. memfit's
own frontier fills the space between, down to the smallest budget that it can meet. All ways then take steps in turn,
round after round; times are medians of CUDA events, peaks are the allocator's, ratios are to the plain step of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from frontier_models import SUBJECTS
from measuring import Row, Way, as_data, machine, measure, print_rows, training_step
from peers import eager_peers
from rich.console import Console
from rich.table import Table

import memfit
from memfit.runtime.ledger import peak_of
from memfit.units import format_bytes


def run(name: str, num_rounds: int, steps_per_round: int, num_points: int) -> dict[str, Any]:
    torch.manual_seed(0)
    subject = SUBJECTS[name]()
    model = subject.model
    device = next(model.parameters()).device
    step = training_step(model, subject.output_and_loss, keep_gradients=False)
    step()
    model.zero_grad()
    profile, profiling_seconds = timed(lambda: memfit.profile(model, subject.batch))
    print(f"{name}: {len(profile.ops)} ops profiled in {profiling_seconds:.1f} s", flush=True)
    ways: dict[str, Way] = {"plain": contextlib.nullcontext, "plain again": contextlib.nullcontext}
    plans: dict[str, memfit.Plan] = {}
    planning_seconds = {}
    for peer, way in eager_peers(subject.blocks).items():
        with way():
            step()
            model.zero_grad()
            peak_bytes = peak_of(step, device, held=[*model.parameters(), *model.buffers(), *subject.tensors()])
        ways[peer] = way
        label = f"memfit at the peak of ({peer})"
        try:
            plans[label], planning_seconds[label] = timed(lambda budget=peak_bytes: memfit.plan(profile, budget=budget))
        except memfit.InfeasibleBudgetError as error:
            print(f"{label}: {error}", flush=True)
    frontier, planning_seconds["frontier"] = timed(lambda: memfit.frontier(profile, points=num_points))
    print(f"{name}: planned in {sum(planning_seconds.values()):.1f} s", flush=True)
    plans |= {f"memfit at {format_bytes(point.peak_bytes)}": point.plan for point in frontier}
    for label, plan in plans.items():
        if plan.regions:
            ways[label] = lambda plan=plan: memfit.apply(model, plan)
    rows = measure(
        ways,
        subject.output_and_loss,
        model,
        subject.tensors(),
        num_rounds=num_rounds,
        steps_per_round=steps_per_round,
        keep_gradients=False,
    )
    print_rows(f"{name}, {machine()}", rows)
    return {
        "rows": as_data(rows),
        "plans": {label: plan_data(plan, label, rows) for label, plan in plans.items()},
        "profiling_seconds": profiling_seconds,
        "planning_seconds": planning_seconds,
        "num_ops": len(profile.ops),
        "profiled_peak_bytes": profile.peak_bytes,
        "profiled_step_seconds": profile.step_seconds,
    }


def plan_data(plan: memfit.Plan, label: str, rows: list[Row]) -> dict[str, Any]:
    measured = next((row for row in rows if row.way == label), None)
    return {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_overhead": plan.predicted_overhead,
        "optimality_gap": plan.optimality_gap,
        "measured_peak_bytes": None if measured is None else measured.peak_bytes,
        "measured_overhead": None if measured is None else measured.ratio - 1,
    }


def print_predictions(results: dict[str, Any]) -> None:
    table = Table("plan", "budget", "predicted", "measured", "predicted overhead", "measured", "gap")
    for label, plan in results["plans"].items():
        measured = plan["measured_peak_bytes"]
        table.add_row(
            label,
            format_bytes(plan["budget_bytes"]) if plan["budget_bytes"] else "",
            format_bytes(plan["predicted_peak_bytes"]),
            format_bytes(measured) if measured else "",
            f"{plan['predicted_overhead']:.3f}",
            f"{plan['measured_overhead']:.3f}" if measured else "",
            f"{plan['optimality_gap']:.4f}",
        )
    Console(width=160).print(table)


def timed(compute: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    return compute(), time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(SUBJECTS)}; default: all")
    parser.add_argument("--json", type=Path, help="write the results here too, after each model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each way in a round")
    parser.add_argument("--points", type=int, default=8, help="points of memfit's own frontier")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "models": {}}
    for name in options.models or SUBJECTS:
        results["models"][name] = run(name, options.rounds, options.steps, options.points)
        print_predictions(results["models"][name])
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(results, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
