"""Acceptance criteria for the measured frontiers, and whether each is met.

    python benchmarks/frontier_criteria.py benchmarks/results/frontier-h200/*.json

1. *speed*: at the memory of each eager method of torch memfit is at least as fast, within the spread: the quartiles of
   the two overlap, or they differ by no more than two runs of the plain step do. One that uses the host's memory is
   compared under 7, where memfit may use it too.
2. *selective*: some plan is faster than torch's selective checkpointing at no more memory, or smaller and as fast.
3. *peak*: no measured peak is above its budget, and predicted peaks are within 2 % of the measured ones.
4. *time*: predicted overheads are within 5 points of the measured ones. The relative error is given beside it where the
   overhead is larger than noise.
5. *half*: half of the activation memory above the smallest plan's costs at most 10 % of time. Nothing is interpolated:
   the first plan at or below the middle counts.
6. *strategies*: at the memory of each of memfit's layer strategies, a plan for that budget is at least as fast.
7. *offloading*: where plans may use the host's memory, they are at least as fast as each eager method at its memory,
   torch's save_on_cpu among them, none is above its budget, and predicted peaks are within 2 % of the measured ones.
8. *lower bound*: within the time that is required at given sizes (`frontier_results.REQUIRED_RATIOS`), with the host's
   memory where that was run.
9. *gradients*: equal to the plain step's, or no farther from them than plain steps are from each other. Where any
   steps differ, all are run with kernels that sum in a fixed order.
10. *compiled*: plans for compiled blocks are within the time that is required at given sizes
    (`frontier_results.REQUIRED_COMPILED_RATIOS`), or above it by no more than two runs of the plain step differ. At
    the memory of each of torch's own budgets they are at least as fast within the spread. None is above its budget,
    and predicted peaks are within 2 % of the measured ones.

Reported beside them: the smallest feasible budget and full checkpointing's peak, seconds of planning, and the lower
bound on the overhead of each budget.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from frontier_results import (
    FULL_CHECKPOINTING,
    GIB,
    OFFLOADING,
    REQUIRED_COMPILED_RATIOS,
    REQUIRED_RATIOS,
    ModelResult,
    PlanResult,
    label_at,
    load,
)
from rich.console import Console
from rich.table import Table
from rows import Row

LARGEST_PEAK_ERROR = 0.02
LARGEST_OVERHEAD_ERROR = 0.05
LARGEST_OVERHEAD_AT_HALF = 0.10
# Smaller ones are not much more than what two runs of the plain step differ by.
SMALLEST_OVERHEAD_ABOVE_NOISE = 0.05


class Verdict(StrEnum):
    """memfit beside a method of torch, at that method's memory."""

    FASTER = "faster"
    AS_FAST = "as fast"
    SLOWER = "slower"
    OVER = "over its memory"
    UNREACHED = "not reachable"
    FAILED = "failed"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class Criterion:
    """Whether a criterion is met (None where it was not measured), and the numbers behind it."""

    name: str
    is_met: bool | None
    summary: str


def verdict_beside(model: ModelResult, peer: Row) -> Verdict:
    """Return how memfit does at the memory of ``peer``."""
    ours = model.memfit_at_peak_of(peer.method)
    if peer.activation_peak_bytes is None:
        return Verdict.NOT_COMPARED
    if ours is None:
        return Verdict.UNREACHED
    if not ours.is_measured:
        return Verdict.FAILED
    if ours.activation_peak_bytes > peer.activation_peak_bytes and model.is_planned_for_peak_of(peer.method):
        return Verdict.OVER
    return compared(ours, peer, model.time_noise) if peer.is_measured else Verdict.NOT_COMPARED


def compared(ours: Row, theirs: Row, noise: float) -> Verdict:
    """Return whether two methods differ in time by more than their spread and ``noise``, a share of the plain step."""
    our_low, our_high = ours.quartile_ratios
    their_low, their_high = theirs.quartile_ratios
    overlap = our_low <= their_high and their_low <= our_high
    if overlap or abs(ours.ratio - theirs.ratio) <= noise:
        return Verdict.AS_FAST
    return Verdict.FASTER if ours.ratio < theirs.ratio else Verdict.SLOWER


def criteria_of(model: ModelResult) -> list[Criterion]:
    """Return the criteria for one model, in the order of the list above."""
    return [
        _speed(model),
        _selective(model),
        _peak(model),
        _time(model),
        half_of_memory(model),
        _strategies(model),
        _offloading(model),
        _lower_bound(model),
        _gradients(model),
        _compiled(model),
    ]


def _speed(model: ModelResult) -> Criterion:
    is_compared_elsewhere = model.offloading is not None and OFFLOADING in model.offloading.rows
    peers = [peer for peer in model.peers() if peer.method != OFFLOADING or not is_compared_elsewhere]
    verdicts = {peer.method: verdict_beside(model, peer) for peer in peers}
    compared_peers = {method: verdict for method, verdict in verdicts.items() if verdict is not Verdict.NOT_COMPARED}
    good = [method for method, verdict in compared_peers.items() if verdict in (Verdict.FASTER, Verdict.AS_FAST)]
    bad = [f"{verdict} ({method})" for method, verdict in compared_peers.items() if method not in good]
    summary = f"{len(good)} of {len(compared_peers)} peers"
    return Criterion("speed", len(good) == len(compared_peers) if compared_peers else None, "; ".join([summary, *bad]))


def _strategies(model: ModelResult) -> Criterion:
    if model.strategies is None:
        return Criterion("strategies", None, "not run")
    return replace(_speed(model.strategies), name="strategies")


def _offloading(model: ModelResult) -> Criterion:
    if model.offloading is None:
        return Criterion("offloading", None, "not run")
    speed, peak = _speed(model.offloading), _peak(model.offloading)
    return Criterion("offloading", bool(speed.is_met and peak.is_met), f"{speed.summary}; {peak.summary}")


def _lower_bound(model: ModelResult) -> Criterion:
    rows = model.rows if model.offloading is None else model.offloading.rows
    required = REQUIRED_RATIOS.get(model.name, {})
    taken = {gib: rows[label_at(gib)] for gib in required if label_at(gib) in rows and rows[label_at(gib)].is_measured}
    if not taken:
        return Criterion("lower bound", None, "nothing is required" if not required else "not run")
    summary = [f"{row.ratio:.3f}× at {gib} GiB (required: {required[gib]:g}×)" for gib, row in taken.items()]
    return Criterion("lower bound", all(row.ratio <= required[gib] for gib, row in taken.items()), "; ".join(summary))


def _compiled(model: ModelResult) -> Criterion:
    if not model.compiled_plans:
        return Criterion("compiled", None, "not run")
    peaks = {name: _peak(group) for name, group in model.compiled_plans.items()}
    missed = [f"{name}: {peak.summary}" for name, peak in peaks.items() if not peak.is_met]
    required = required_compiled(model)
    missed += [
        f"{'not measured' if ratio is None else f'{ratio:.3f}×'} at {gib} GiB ({name}; required: {limit:g}×)"
        for name, gib, limit, ratio in required
        if ratio is None or ratio > limit + model.compiled_plans[name].time_noise
    ]
    beside = beside_torchs_budgets(model)
    slower = [theirs.method for theirs, _, verdict in beside if verdict not in (Verdict.FASTER, Verdict.AS_FAST)]
    missed += [f"not as fast as {method}" for method in slower]
    summary = f"{len(required)} required times; {len(beside) - len(slower)} of {len(beside)} of torch's budgets"
    return Criterion("compiled", not missed, "; ".join([summary, *missed]))


def required_compiled(model: ModelResult) -> list[tuple[str, float, float, float | None]]:
    """Return the group, GiB of activations, required and measured time of each required plan for compiled blocks."""
    found = []
    for name, required in REQUIRED_COMPILED_RATIOS.get(model.name, {}).items():
        rows = model.compiled_plans[name].rows if name in model.compiled_plans else {}
        for gib, limit in required.items():
            row = rows.get(label_at(gib))
            found.append((name, gib, limit, None if row is None else row.ratio))
    return found


def beside_torchs_budgets(model: ModelResult) -> list[tuple[Row, Row | None, Verdict]]:
    """Return torch.compile at each of its budgets, memfit's plan at its peak, and how that does.

    The two are of runs of their own, each relative to its own plain step.
    """
    group = model.compiled_plans.get("compiled")
    found = []
    for method, theirs in model.compiled.items():
        if group is None or not method.startswith("torch.compile") or not theirs.is_measured:
            continue
        ours = group.rows.get(f"memfit at the peak of ({method})")
        noise = max(group.time_noise, model.time_noise)
        is_measured = ours is not None and ours.is_measured
        found.append((theirs, ours, compared(ours, theirs, noise) if is_measured else Verdict.UNREACHED))
    return found


def _selective(model: ModelResult) -> Criterion:
    peers = [peer for peer in model.peers() if "selective" in peer.method and peer.is_measured]
    dominated = {peer.method: _is_dominated(model, peer) for peer in peers}
    bad = [method for method, is_dominated in dominated.items() if not is_dominated]
    summary = f"{len(peers) - len(bad)} of {len(peers)} rules dominated"
    return Criterion(
        "selective", not bad if peers else None, "; ".join([summary, *(f"not {method}" for method in bad)])
    )


def _is_dominated(model: ModelResult, peer: Row) -> bool:
    for ours in model.memfit_rows():
        verdict = compared(ours, peer, model.time_noise)
        if ours.activation_peak_bytes <= peer.activation_peak_bytes and verdict is Verdict.FASTER:
            return True
        if ours.activation_peak_bytes < peer.activation_peak_bytes and verdict is Verdict.AS_FAST:
            return True
    return False


def _peak(model: ModelResult) -> Criterion:
    measured = [plan for plan in model.plans if plan.measured_peak_bytes is not None]
    if not measured:
        return Criterion("peak", None, "no plan was measured")
    over = [plan for plan in measured if plan.budget_bytes is not None and plan.measured_peak_bytes > plan.budget_bytes]
    worst = max(measured, key=lambda plan: abs(peak_error(plan)))
    summary = f"{len(over)} of {len(measured)} over budget; predicted off by at most {abs(peak_error(worst)):.2%}"
    if over:
        most = max(over, key=lambda plan: plan.measured_peak_bytes / plan.budget_bytes)
        summary += f"; most over: {most.label}, by {most.measured_peak_bytes / most.budget_bytes - 1:.2%}"
    return Criterion("peak", not over and abs(peak_error(worst)) <= LARGEST_PEAK_ERROR, summary)


def _time(model: ModelResult) -> Criterion:
    measured = [plan for plan in model.plans if plan.measured_overhead is not None]
    if not measured:
        return Criterion("time", None, "no plan was measured")
    worst = max(measured, key=lambda plan: abs(overhead_error(plan)))
    summary = f"predicted off by at most {100 * abs(overhead_error(worst)):.1f} points ({worst.label})"
    shares = [abs(overhead_error(plan)) / plan.measured_overhead for plan in measured if is_above_noise(plan)]
    if shares:
        summary += f"; by at most {max(shares):.0%} of an overhead of {SMALLEST_OVERHEAD_ABOVE_NOISE:.0%} or more"
    return Criterion("time", abs(overhead_error(worst)) <= LARGEST_OVERHEAD_ERROR, summary)


def half_of_memory(model: ModelResult) -> Criterion:
    """Return what half of the activation memory above the smallest plan costs."""
    rows = model.memfit_rows()
    if not rows:
        return Criterion("half", None, "no plan was measured")
    smallest_bytes = rows[-1].activation_peak_bytes
    middle_bytes = (model.plain.activation_peak_bytes + smallest_bytes) / 2
    first = next(row for row in rows if row.activation_peak_bytes <= middle_bytes)
    summary = (
        f"{first.ratio - 1:+.1%} at {first.activation_peak_bytes / GIB:.2f} GiB; from "
        f"{model.plain.activation_peak_bytes / GIB:.2f} down to the smallest, {smallest_bytes / GIB:.2f}, "
        f"the middle is {middle_bytes / GIB:.2f}"
    )
    return Criterion("half", first.ratio - 1 <= LARGEST_OVERHEAD_AT_HALF, summary)


def _gradients(model: ModelResult) -> Criterion:
    rows = [row for row in model.memfit_rows() if row.gradient_error is not None]
    if not rows:
        return Criterion("gradients", None, "none were compared")
    num_equal = sum(row.gradient_error == 0.0 for row in rows)
    worst = max(row.gradient_error for row in rows)
    summary = f"{num_equal} of {len(rows)} plans equal; at most {worst:.1e} off, plain steps {model.gradient_noise:.1e}"
    if model.kernel_noise:
        summary += f" with sums in a fixed order, {model.kernel_noise:.1e} without"
    return Criterion("gradients", worst <= model.gradient_noise, summary)


def peak_error(plan: PlanResult) -> float:
    """Return how far the predicted peak is from the measured, as a share of it; positive where it was too high."""
    return plan.predicted_peak_bytes / plan.measured_peak_bytes - 1


def overhead_error(plan: PlanResult) -> float:
    """Return the predicted overhead less the measured, as a share of the plain step."""
    return plan.predicted_overhead - plan.measured_overhead


def is_above_noise(plan: PlanResult) -> bool:
    """Return whether the measured overhead is large enough for its own share to mean something."""
    return plan.measured_overhead is not None and plan.measured_overhead >= SMALLEST_OVERHEAD_ABOVE_NOISE


def smallest_in_words(model: ModelResult) -> str:
    """Return the smallest feasible budget, full checkpointing's peak, and how long planning took."""
    full = model.rows.get(FULL_CHECKPOINTING)
    beside = "not measured" if full is None or full.peak_bytes is None else f"{full.peak_bytes / GIB:.2f} GiB"
    # Of all groups that ran together, for what one has found serves the others.
    seconds = model.facts.get("seconds", {}).get("planning", sum(model.facts["planning_seconds"].values()))
    return (
        f"Smallest feasible budget {model.smallest_budget_bytes / GIB:.2f} GiB, checkpointing every block peaks at "
        f"{beside}. Planning took {seconds:.1f} s."
    )


def points_in_words(models: Sequence[ModelResult]) -> str:
    """Return how often memfit, given the peak of a method that recomputes, is faster, as fast and slower."""
    peers = [(model, peer) for model in models for peer in model.peers() if peer.method != OFFLOADING]
    counts = Counter(verdict_beside(model, peer) for model, peer in peers)
    compared_peers = ", ".join(f"{verdict} at {counts[verdict]}" for verdict in Verdict if counts[verdict])
    return f"At {counts.total()} peaks of torch's methods: {compared_peers}."


def symbol(is_met: bool | None) -> str:
    return {True: "✓", False: "✗", None: "–"}[is_met]


def print_criteria(models: Sequence[ModelResult]) -> None:
    console = Console(width=170)
    for model in models:
        table = Table("criterion", "", "measured", title=f"{model.name}, {model.machine}", title_justify="left")
        for criterion in criteria_of(model):
            table.add_row(criterion.name, symbol(criterion.is_met), criterion.summary)
        console.print(table)
        if model.note:
            console.print(f"Note: {model.note}")
        console.print(smallest_in_words(model))
        plans = Table("plan", "budget GiB", "lower bound %", "predicted %", "measured %", "above the bound, points")
        for plan in model.plans:
            cells = [plan.label, "" if plan.budget_bytes is None else f"{plan.budget_bytes / GIB:.2f}"]
            cells += [f"{100 * plan.overhead_bound:.1f}", f"{100 * plan.predicted_overhead:.1f}"]
            if plan.measured_overhead is not None:
                above = plan.measured_overhead - plan.overhead_bound
                cells += [f"{100 * plan.measured_overhead:.1f}", f"{100 * above:+.1f}"]
            plans.add_row(*cells)
        console.print(plans)
    console.print(points_in_words(models))
    summary = Table(
        "model", *(criterion.name for criterion in criteria_of(models[0])), title="All criteria", title_justify="left"
    )
    for model in models:
        summary.add_row(model.name, *(symbol(criterion.is_met) for criterion in criteria_of(model)))
    console.print(summary)


def main() -> None:
    models = load(Path(path) for path in sys.argv[1:])
    if not models:
        sys.exit("give the JSON files that frontier.py wrote")
    print_criteria(models)


if __name__ == "__main__":
    main()
