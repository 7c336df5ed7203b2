"""The step captured into a CUDA graph, which launches nothing when it runs: what a plan costs the device alone.

A group of its own, with the captured plain step as its measure. Plans are made for it (`ModelProfile.for_cuda_graph`),
and torch's checkpointing keeps no random state in it, which cannot be read while a graph is captured. Each graph holds
on to its memory, so that one is captured and measured after the other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from frontier_models import Subject
from measuring import Race, as_data, machine, print_rows
from peers import eager_peers

import memfit
from memfit.units import format_bytes


def run_captured(
    name: str, subject: Subject, num_points: int, num_steps: int, data_of: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """Measure the plain step, torch's methods and memfit's plans; ``data_of`` describes a plan beside the rows."""
    model = subject.model
    race = Race(model, subject.output_and_loss, subject.tensors(), keep_gradients=False)
    reference = race.host_gradients()
    model.zero_grad()
    profile = memfit.profile(model, subject.batch).for_cuda_graph()

    def run(label: str, method: Any) -> int | None:
        return race.run_captured(label, method, num_steps=num_steps, reference=reference)

    run("plain", contextlib.nullcontext)
    peers = eager_peers(subject.blocks, preserve_rng_state=False)
    peaks = {peer: run(peer, method) for peer, method in peers.items()}
    begin = time.perf_counter()
    largest, *_, smallest = (point.peak_bytes for point in memfit.frontier(profile, points=2))
    budgets = [largest - (largest - smallest) * number // (num_points - 1) for number in range(num_points)]
    planning_seconds = time.perf_counter() - begin
    labels = {f"memfit at the peak of ({peer})": peak for peer, peak in peaks.items() if peak is not None}
    labels |= {f"memfit at {format_bytes(budget)}": budget for budget in budgets[1:]}
    plans: dict[str, memfit.Plan] = {}
    infeasible: dict[str, str] = {}
    for label, budget_bytes in labels.items():
        try:
            plans[label] = plan = memfit.plan(profile, budget=budget_bytes)
        except memfit.InfeasibleBudgetError as error:
            infeasible[label] = str(error)
            continue
        run(label, lambda plan=plan: memfit.apply(model, plan))
    run("plain again", contextlib.nullcontext)
    rows = race.rows()
    print_rows(f"{name}, captured, {machine()}", rows)
    return {
        "rows": as_data(rows),
        "plans": {label: data_of(plan, label, rows) for label, plan in plans.items()},
        "infeasible": infeasible,
        "smallest_budget_bytes": smallest,
        "planning_seconds": {"frontier": planning_seconds},
        "num_ops": len(profile.ops),
    }
