"""What was to be reached, and whether the measured frontiers reach it.

    python benchmarks/frontier_marks.py benchmarks/results/frontier-h200/*.json

1. *speed*: at the memory of each eager peer memfit is at least as fast, within the spread: the quartiles of the two
   overlap, or they differ by no more than two runs of the plain step do. A peer that uses the host's memory is told of
   under 7 where that was run, as only there memfit may use it, too.
2. *selective*: some plan is faster than torch's selective checkpointing at no more memory, or smaller and as fast.
3. *peak*: no measured peak is above its budget, and predicted ones are within 2 % of the measured.
4. *time*: predicted overheads are within 5 points of the measured. Beside it, how far off they are as a share of
   themselves, where they are no noise.
5. *half*: half of the activation memory above the floor costs at most 10 % of time. The floor is the activation peak of
   memfit's smallest plan. Nothing is interpolated: the first plan at or below the middle counts.
6. *strategies*: at the memory of each of memfit's own layer strategies, where those were run, a plan for that budget is
   at least as fast as the strategy.
7. *offloading*: where plans may use the host's memory, they are at least as fast as each eager peer at its memory,
   torch's save_on_cpu among them, none is above its budget, and predicted peaks are within 2 % of the measured.
8. *floor*: within the time that is asked for at given sizes (`frontier_results.NEAR_THE_FLOOR`), with the host's memory
   where that was run.
9. *gradients*: equal to the plain step's, or no farther from them than plain steps are from each other. Where any
   steps differ, all are run with kernels that sum in a fixed order. (In results from before that was so, both are the
   largest of a few draws, so that a narrow miss can be chance; a wide one cannot.)

Beside them, without a mark: the smallest feasible budget and full checkpointing's peak, seconds of planning, and what
each budget forces to be recomputed, which no plan can go below.
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
    NEAR_THE_FLOOR,
    OFFLOADING,
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
SMALLEST_OVERHEAD_TOLD = 0.05


class Verdict(StrEnum):
    """memfit beside a peer, at the peer's memory."""

    FASTER = "faster"
    AS_FAST = "as fast"
    SLOWER = "slower"
    OVER = "over its memory"
    UNREACHED = "cannot be met"
    FAILED = "failed"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class Mark:
    """Whether a mark is reached, None where nothing was measured that could tell, and the numbers behind it."""

    name: str
    is_met: bool | None
    words: str


def verdict_beside(model: ModelResult, peer: Row) -> Verdict:
    """Return how memfit does at the memory of ``peer``."""
    ours = model.memfit_at_peak_of(peer.way)
    if peer.activation_peak_bytes is None:
        return Verdict.NOT_COMPARED
    if ours is None:
        return Verdict.UNREACHED
    if not ours.is_measured:
        return Verdict.FAILED
    if ours.activation_peak_bytes > peer.activation_peak_bytes and model.is_planned_for_peak_of(peer.way):
        return Verdict.OVER
    return compared(ours, peer, model.time_noise) if peer.is_measured else Verdict.NOT_COMPARED


def compared(ours: Row, theirs: Row, noise: float) -> Verdict:
    """Return whether two ways differ in time by more than their spread and ``noise``, a share of the plain step."""
    our_low, our_high = ours.quartile_ratios
    their_low, their_high = theirs.quartile_ratios
    overlap = our_low <= their_high and their_low <= our_high
    if overlap or abs(ours.ratio - theirs.ratio) <= noise:
        return Verdict.AS_FAST
    return Verdict.FASTER if ours.ratio < theirs.ratio else Verdict.SLOWER


def marks_of(model: ModelResult) -> list[Mark]:
    """Return the marks of one model, in the order of the list above."""
    return [
        _speed(model),
        _selective(model),
        _peak(model),
        _time(model),
        half_of_memory(model),
        _strategies(model),
        _offloading(model),
        _near_the_floor(model),
        _gradients(model),
    ]


def _speed(model: ModelResult) -> Mark:
    is_told_elsewhere = model.offloading is not None and OFFLOADING in model.offloading.rows
    peers = [peer for peer in model.peers() if peer.way != OFFLOADING or not is_told_elsewhere]
    verdicts = {peer.way: verdict_beside(model, peer) for peer in peers}
    told = {way: verdict for way, verdict in verdicts.items() if verdict is not Verdict.NOT_COMPARED}
    good = [way for way, verdict in told.items() if verdict in (Verdict.FASTER, Verdict.AS_FAST)]
    bad = [f"{verdict} ({way})" for way, verdict in told.items() if way not in good]
    words = f"{len(good)} of {len(told)} peers"
    return Mark("speed", len(good) == len(told) if told else None, "; ".join([words, *bad]))


def _strategies(model: ModelResult) -> Mark:
    if model.strategies is None:
        return Mark("strategies", None, "not run")
    return replace(_speed(model.strategies), name="strategies")


def _offloading(model: ModelResult) -> Mark:
    if model.offloading is None:
        return Mark("offloading", None, "not run")
    speed, peak = _speed(model.offloading), _peak(model.offloading)
    return Mark("offloading", bool(speed.is_met and peak.is_met), f"{speed.words}; {peak.words}")


def _near_the_floor(model: ModelResult) -> Mark:
    rows = model.rows if model.offloading is None else model.offloading.rows
    asked = NEAR_THE_FLOOR.get(model.name, {})
    taken = {gib: rows[label_at(gib)] for gib in asked if label_at(gib) in rows and rows[label_at(gib)].is_measured}
    if not taken:
        return Mark("floor", None, "nothing is asked for" if not asked else "not run")
    words = [f"{row.ratio:.3f}× at {gib} GiB (asked for: {asked[gib]:g}×)" for gib, row in taken.items()]
    return Mark("floor", all(row.ratio <= asked[gib] for gib, row in taken.items()), "; ".join(words))


def _selective(model: ModelResult) -> Mark:
    peers = [peer for peer in model.peers() if "selective" in peer.way and peer.is_measured]
    beaten = {peer.way: _is_beaten(model, peer) for peer in peers}
    bad = [way for way, is_beaten in beaten.items() if not is_beaten]
    words = f"{len(peers) - len(bad)} of {len(peers)} rules beaten"
    return Mark("selective", not bad if peers else None, "; ".join([words, *(f"not {way}" for way in bad)]))


def _is_beaten(model: ModelResult, peer: Row) -> bool:
    for ours in model.memfit_rows():
        verdict = compared(ours, peer, model.time_noise)
        if ours.activation_peak_bytes <= peer.activation_peak_bytes and verdict is Verdict.FASTER:
            return True
        if ours.activation_peak_bytes < peer.activation_peak_bytes and verdict is Verdict.AS_FAST:
            return True
    return False


def _peak(model: ModelResult) -> Mark:
    measured = [plan for plan in model.plans if plan.measured_peak_bytes is not None]
    if not measured:
        return Mark("peak", None, "no plan was measured")
    over = [plan for plan in measured if plan.budget_bytes is not None and plan.measured_peak_bytes > plan.budget_bytes]
    worst = max(measured, key=lambda plan: abs(peak_error(plan)))
    words = f"{len(over)} of {len(measured)} over budget; predicted off by at most {abs(peak_error(worst)):.2%}"
    if over:
        most = max(over, key=lambda plan: plan.measured_peak_bytes / plan.budget_bytes)
        words += f"; most over: {most.label}, by {most.measured_peak_bytes / most.budget_bytes - 1:.2%}"
    return Mark("peak", not over and abs(peak_error(worst)) <= LARGEST_PEAK_ERROR, words)


def _time(model: ModelResult) -> Mark:
    measured = [plan for plan in model.plans if plan.measured_overhead is not None]
    if not measured:
        return Mark("time", None, "no plan was measured")
    worst = max(measured, key=lambda plan: abs(overhead_error(plan)))
    words = f"predicted off by at most {100 * abs(overhead_error(worst)):.1f} points ({worst.label})"
    shares = [abs(overhead_error(plan)) / plan.measured_overhead for plan in measured if is_told_from_noise(plan)]
    if shares:
        words += f"; by at most {max(shares):.0%} of an overhead of {SMALLEST_OVERHEAD_TOLD:.0%} or more"
    return Mark("time", abs(overhead_error(worst)) <= LARGEST_OVERHEAD_ERROR, words)


def half_of_memory(model: ModelResult) -> Mark:
    """Return what half of the activation memory above the floor costs."""
    rows = model.memfit_rows()
    if not rows:
        return Mark("half", None, "no plan was measured")
    floor_bytes = rows[-1].activation_peak_bytes
    middle_bytes = (model.plain.activation_peak_bytes + floor_bytes) / 2
    first = next(row for row in rows if row.activation_peak_bytes <= middle_bytes)
    words = (
        f"{first.ratio - 1:+.1%} at {first.activation_peak_bytes / GIB:.2f} GiB; from "
        f"{model.plain.activation_peak_bytes / GIB:.2f} down to the floor of {floor_bytes / GIB:.2f}, "
        f"the middle is {middle_bytes / GIB:.2f}"
    )
    return Mark("half", first.ratio - 1 <= LARGEST_OVERHEAD_AT_HALF, words)


def _gradients(model: ModelResult) -> Mark:
    rows = [row for row in model.memfit_rows() if row.gradient_error is not None]
    if not rows:
        return Mark("gradients", None, "none were compared")
    num_equal = sum(row.gradient_error == 0.0 for row in rows)
    worst = max(row.gradient_error for row in rows)
    words = f"{num_equal} of {len(rows)} plans equal; at most {worst:.1e} off, plain steps {model.gradient_noise:.1e}"
    if model.kernel_noise:
        words += f" with sums in a fixed order, {model.kernel_noise:.1e} without"
    return Mark("gradients", worst <= model.gradient_noise, words)


def peak_error(plan: PlanResult) -> float:
    """Return how far the predicted peak is from the measured, as a share of it; positive where it was too high."""
    return plan.predicted_peak_bytes / plan.measured_peak_bytes - 1


def overhead_error(plan: PlanResult) -> float:
    """Return the predicted overhead less the measured, as a share of the plain step."""
    return plan.predicted_overhead - plan.measured_overhead


def is_told_from_noise(plan: PlanResult) -> bool:
    """Return whether the measured overhead is large enough for its own share to mean something."""
    return plan.measured_overhead is not None and plan.measured_overhead >= SMALLEST_OVERHEAD_TOLD


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
    """Return how often memfit, given the peak of a way that recomputes, is faster, as fast and slower than that way."""
    peers = [(model, peer) for model in models for peer in model.peers() if peer.way != OFFLOADING]
    counts = Counter(verdict_beside(model, peer) for model, peer in peers)
    told = ", ".join(f"{verdict} at {counts[verdict]}" for verdict in Verdict if counts[verdict])
    return f"At {counts.total()} peaks of ways that recompute: {told}."


def symbol(is_met: bool | None) -> str:
    return {True: "✓", False: "✗", None: "–"}[is_met]


def print_marks(models: Sequence[ModelResult]) -> None:
    console = Console(width=170)
    for model in models:
        table = Table("mark", "", "measured", title=f"{model.name}, {model.machine}", title_justify="left")
        for mark in marks_of(model):
            table.add_row(mark.name, symbol(mark.is_met), mark.words)
        console.print(table)
        if model.note:
            console.print(f"Note: {model.note}")
        console.print(smallest_in_words(model))
        plans = Table("plan", "budget GiB", "forced %", "predicted %", "measured %", "above what is forced, points")
        for plan in model.plans:
            cells = [plan.label, "" if plan.budget_bytes is None else f"{plan.budget_bytes / GIB:.2f}"]
            cells += [f"{100 * plan.forced_overhead:.1f}", f"{100 * plan.predicted_overhead:.1f}"]
            if plan.measured_overhead is not None:
                above = plan.measured_overhead - plan.forced_overhead
                cells += [f"{100 * plan.measured_overhead:.1f}", f"{100 * above:+.1f}"]
            plans.add_row(*cells)
        console.print(plans)
    console.print(points_in_words(models))
    summary = Table("model", *(mark.name for mark in marks_of(models[0])), title="All marks", title_justify="left")
    for model in models:
        summary.add_row(model.name, *(symbol(mark.is_met) for mark in marks_of(model)))
    console.print(summary)


def main() -> None:
    models = load(Path(path) for path in sys.argv[1:])
    if not models:
        sys.exit("give the JSON files that frontier.py wrote")
    print_marks(models)


if __name__ == "__main__":
    main()
