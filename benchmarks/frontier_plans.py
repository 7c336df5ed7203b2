"""memfit's plans in the frontier benchmark: for which budgets, beside which peers, and what is known of them.

Plans that may use the host's memory are a group of their own, and run beside the others where both are asked for.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from frontier_results import OFFLOADING, PLAIN, PLAIN_AGAIN
from measuring import Race, as_data
from rows import Row

import memfit
from memfit.units import format_bytes

_Result = TypeVar("_Result")
# Behind the labels of plans that may offload, as long as they run beside the others.
_WITH_THE_HOST = " (with the host's memory)"


def groups_of_plans(
    profile: memfit.ModelProfile, peaks: Mapping[str, int | None], options: argparse.Namespace
) -> dict[str | None, Plans]:
    """Return memfit's groups, with no plans yet, each with the peers that it is measured beside."""
    if options.strategies:
        return {"strategies": Plans(profile, peaks, host_budget=0)}
    if not options.offloading:
        return {None: Plans(profile, peaks, host_budget=0)}
    groups: dict[str | None, Plans] = {}
    if options.offloading != "alone":
        # No recomputation reaches the memory of a method that offloads.
        recomputing = {peer: peak_bytes for peer, peak_bytes in peaks.items() if peer != OFFLOADING}
        groups[None] = Plans(profile, recomputing, host_budget=0)
    # On the CPU, where the script is only tried, there is nowhere to offload to.
    host_budget = 0 if profile.link is None else "auto"
    groups["offloading"] = Plans(profile, peaks, host_budget=host_budget, suffix=_WITH_THE_HOST)
    return groups


class Plans:
    """memfit's plans by label, with the seconds each took, and what could not be planned and why.

    They are a group with the peers whose peaks are given. In the race, ``suffix`` distinguishes them from others.
    """

    def __init__(
        self,
        profile: memfit.ModelProfile,
        peaks: Mapping[str, int | None],
        *,
        host_budget: int | str,
        suffix: str = "",
    ) -> None:
        self.suffix = suffix
        self._profile = profile
        self._peaks = peaks
        self._host_budget = host_budget
        self.plans: dict[str, memfit.Plan] = {}
        self.infeasible: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        ends, self.seconds["frontier"] = timed(lambda: memfit.frontier(profile, points=2, host_budget=host_budget))
        self._largest_bytes, self.smallest_bytes = ends[0].peak_bytes, ends[-1].peak_bytes

    def add(self, label: str, budget_bytes: int) -> None:
        """Plan for a budget, or note why there is no plan.

        What lies below the frontier is not looked for: that takes minutes of a GPU that has nothing to do.
        """
        if budget_bytes < self.smallest_bytes:
            self.infeasible[label] = f"the smallest plan has {self.smallest_bytes} bytes, the budget is {budget_bytes}"
            print(f"{label}: {self.infeasible[label]}", flush=True)
            return
        try:
            self.plans[label], self.seconds[label] = timed(
                lambda: memfit.plan(self._profile, budget=budget_bytes, host_budget=self._host_budget)
            )
        except memfit.MemfitError as error:
            self.infeasible[label] = str(error)
            print(f"{label}: {error}", flush=True)

    def add_at_peaks(self) -> None:
        """Plan for the peak of each peer as a budget."""
        for peer, peak_bytes in self._peaks.items():
            if peak_bytes is not None:
                self.add(f"memfit at the peak of ({peer})", peak_bytes)

    def add_evenly_spread(self, num_budgets: int) -> None:
        """Plan for budgets from the peak of the plain step to the smallest that can be met."""
        span = self._largest_bytes - self.smallest_bytes
        for number in range(num_budgets):
            budget_bytes = self._largest_bytes - span * number // max(num_budgets - 1, 1)
            label = f"memfit at {format_bytes(budget_bytes)}"
            self.add(f"{label} ({budget_bytes} bytes)" if label in self.plans else label, budget_bytes)

    def results(self, rows: list[Row]) -> dict[str, Any]:
        """Return what is known of this group, with the rows of its plans, its peers and the plain step."""
        own = {PLAIN, PLAIN_AGAIN, *self._peaks, *(f"{label}{self.suffix}" for label in self.plans)}
        shown = [self._without_suffix(row) for row in rows if row.method in own]
        return {
            "rows": as_data(shown),
            "plans": {label: plan_data(plan, label, shown) for label, plan in self.plans.items()},
            "infeasible": self.infeasible,
            "smallest_budget_bytes": self.smallest_bytes,
            "planning_seconds": self.seconds,
        }

    def _without_suffix(self, row: Row) -> Row:
        same_as = None if row.same_as is None else row.same_as.removesuffix(self.suffix)
        return replace(row, method=row.method.removesuffix(self.suffix), same_as=same_as)


def enter_plans(race: Race, model: torch.nn.Module, plans: Plans) -> None:
    """Enter each plan once, under its first label; one that saves everything is the plain step."""
    first_label: dict[tuple[Any, ...], str] = {(frozenset(), (), (), 0): PLAIN}
    for label, plan in ((f"{label}{plans.suffix}", plan) for label, plan in plans.plans.items()):
        dropped = frozenset(entry for entry in plan.decisions.items() if entry[1] is not memfit.Decision.SAVE)
        what_it_does = (
            *(dropped, plan.recorded_modules, plan.hooked_modules, plan.window_bytes),
            *_choices_of_compiled(plan),
        )
        if what_it_does in first_label:
            race.enter_as(label, first_label[what_it_does])
        else:
            first_label[what_it_does] = label
            race.enter(label, lambda plan=plan: memfit.apply(model, plan))


def _choices_of_compiled(plan: memfit.Plan) -> tuple[Any, ...]:
    """Return what the plan decides beside the values of the eager engine; nothing for a plan without any of it."""
    if plan.compiled is None:
        return (plan.chunks_loss,) if plan.chunks_loss else ()
    return plan.chunks_loss, frozenset(plan.compiled.choice.items()), frozenset(plan.compiled.offloaded.items())


def enter_strategies(race: Race, model: torch.nn.Module, profile: memfit.ModelProfile) -> dict[str, int | None]:
    """Enter what each layer strategy chooses, once each, and return the peaks."""
    num_blocks = len(profile.blocks)
    half_bytes = sum(layer.activation_size_bytes for layer in profile.layers) // 2
    strategies = (
        memfit.Full(),
        memfit.Selective(0.5),
        memfit.AttentionOnly(),
        memfit.FfnOnly(),
        memfit.EveryNthLayer(2),
        memfit.EveryNthLayer(4),
        memfit.LargestLayers(num_blocks // 3),
        memfit.SqrtLayers(),
        memfit.Budget.from_bytes(half_bytes),
    )
    peaks: dict[str, int | None] = {}
    known = {frozenset(): ""}
    for strategy in strategies:
        plan = memfit.plan(profile, strategy=strategy)
        chosen = frozenset(value for value, decision in plan.decisions.items() if decision is not memfit.Decision.SAVE)
        label = f"layers: {strategy!r}"
        if chosen in known:
            print(f"{label}: the same as {known[chosen] or 'the plain step'}", flush=True)
            continue
        known[chosen] = label
        peaks[label] = race.enter(label, lambda plan=plan: memfit.apply(model, plan))
    return peaks


def plan_data(plan: memfit.Plan, label: str, rows: list[Row]) -> dict[str, Any]:
    measured = next(row for row in rows if row.method == label)
    return {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_overhead": plan.predicted_overhead,
        "optimality_gap": plan.optimality_gap,
        "num_regions": len(plan.recorded_modules),
        "host_bytes": plan.host_bytes,
        "window_bytes": plan.window_bytes,
        "measured_peak_bytes": measured.peak_bytes,
        "measured_overhead": None if measured.ratio is None else measured.ratio - 1,
    }


def timed(compute: Callable[[], _Result]) -> tuple[_Result, float]:
    begin = time.perf_counter()
    return compute(), time.perf_counter() - begin
