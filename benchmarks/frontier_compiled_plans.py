"""memfit's plans for compiled blocks beside the plain, eager step of the same run, interleaved.

Budgets are the memory of each of torch's five activation-memory budgets (as DIR/MODEL-compiled.json has them), the
sizes at which a time is required, and some that are evenly spread. Language models are measured with a chunked loss as
well, and those with required times also with the host's memory. Which partitions exist is decided while profiling,
where the gradients of each are compared with those of the one that saves everything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from frontier_models import Subject
from frontier_plans import Plans, enter_plans
from frontier_results import GIB, PLAIN, PLAIN_AGAIN, REQUIRED_COMPILED_RATIOS, label_at
from measuring import Race, machine, print_rows

import memfit
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.profiling import with_compiled_blocks
from memfit.units import format_bytes

COMPILED, CHUNKED, WITH_HOST = "compiled", "chunked loss", "the host's memory"
_RESULTS = Path(__file__).parent / "results/frontier-h200"


@dataclass(frozen=True)
class _Group:
    """Plans that share a profile: with a chunked loss or without, in the host's memory too or not, compiled or not."""

    name: str
    profile: memfit.ModelProfile
    host_budget: str | int
    num_points: int


def run_compiled_plans(name: str, subject: Subject, options: argparse.Namespace, begin: float) -> dict[str, Any]:
    """Measure the plans of all groups beside the plain step."""
    model = subject.model
    race = Race(model, subject.output_and_loss, subject.tensors(), keep_gradients=False)
    race.enter(PLAIN, contextlib.nullcontext)
    model.zero_grad()
    seconds: dict[str, float] = {}
    groups = list(_groups(name, subject, options, seconds))
    planned = {
        group.name: _plans(name, group, race.bytes_before(PLAIN), race.activation_peak_bytes(PLAIN), options)
        for group in groups
    }
    for plans in planned.values():
        enter_plans(race, model, plans)
    race.enter(PLAIN_AGAIN, contextlib.nullcontext)
    _print_peaks(race, planned)
    num_rounds = race.run_rounds(
        options.rounds, steps_per_round=options.steps, fewest_rounds=2, end_by=begin + options.seconds
    )
    rows = race.rows()
    print_rows(f"{name}, compiled plans, {machine()}", rows)
    print(f"{name}: {num_rounds} rounds, seconds: {seconds}", flush=True)
    return {
        "num_rounds": num_rounds,
        "seconds": seconds,
        "groups": {group.name: planned[group.name].results(rows) | _facts(group.profile) for group in groups},
    }


def _print_peaks(race: Race, planned: Mapping[str, Plans]) -> None:
    """Print the peaks before the times, which a run that is cut off does not have."""
    for plans in planned.values():
        for label, plan in plans.plans.items():
            predicted = format_bytes(plan.predicted_peak_bytes)
            print(f"{label}{plans.suffix}: {race.outcome(f'{label}{plans.suffix}')}, {predicted} predicted", flush=True)


def _groups(name: str, subject: Subject, options: argparse.Namespace, seconds: dict[str, float]) -> Iterator[_Group]:
    """Yield the groups that are measured for this model, each with its profile."""

    def measured(label: str, take: Callable[[], memfit.ModelProfile]) -> memfit.ModelProfile:
        begin = time.perf_counter()
        profile = take()
        seconds[label] = time.perf_counter() - begin
        print(f"{name}: {label} took {seconds[label]:.1f} s", flush=True)
        return profile

    # As `fit` does: one eager profile, and partitions that are compiled once, for the step with and without chunks.
    required = REQUIRED_COMPILED_RATIOS.get(name, {})
    step = TrainingStep(subject.model, StepArguments(subject.batch))
    plain = measured("profiling in eager", lambda: memfit.profile(subject.model, subject.batch))
    compiled = measured("profiling with compiled blocks", lambda: with_compiled_blocks(plain, step))
    if COMPILED not in options.without:
        yield _Group(COMPILED, compiled, 0, options.points)
    if not isinstance(subject.batch, dict) or "labels" not in subject.batch:
        return
    chunked = measured(
        "profiling with compiled blocks and a chunked loss",
        lambda: _beside_plain(
            with_compiled_blocks(plain, step, chunk_loss=True, of_same_blocks=compiled.compiled), compiled
        ),
    )
    yield _Group(CHUNKED, chunked, 0, options.points)
    if not required:
        return
    if chunked.link is not None:
        yield _Group(f"{CHUNKED}, {WITH_HOST}", chunked, "auto", options.points // 2)
    if f"eager, {CHUNKED}" not in options.without:
        eager = measured(
            "profiling in eager with a chunked loss",
            lambda: memfit.profile(subject.model, subject.batch, chunk_loss=True),
        )
        yield _Group(f"eager, {CHUNKED}", eager, 0, options.points // 2)


def _beside_plain(chunked: memfit.ModelProfile, compiled: memfit.ModelProfile) -> memfit.ModelProfile:
    """Return ``chunked``, with overheads relative to the step whose loss is not chunked."""
    assert chunked.compiled is not None
    assert compiled.compiled is not None
    return replace(chunked, compiled=replace(chunked.compiled, plain_seconds=compiled.compiled.plain_seconds))


def _plans(name: str, group: _Group, bytes_before: int, plain_bytes: int, options: argparse.Namespace) -> Plans:
    """Return the plans of a group: at the memory of torch's budgets, at required sizes, and evenly spread."""
    peaks: Mapping[str, int] = {}
    if group.name == COMPILED and not options.small:
        peaks = _peaks_of_torch(name, bytes_before, plain_bytes)
    suffix = "" if group.name == COMPILED else f" ({group.name})"
    plans = Plans(group.profile, peaks, host_budget=group.host_budget, suffix=suffix)
    plans.add_at_peaks()
    if not options.small:
        for activations_gib in REQUIRED_COMPILED_RATIOS.get(name, {}).get(group.name, {}):
            plans.add(label_at(activations_gib), bytes_before + int(activations_gib * GIB))
    plans.add_evenly_spread(group.num_points)
    return plans


def _peaks_of_torch(name: str, bytes_before: int, plain_bytes: int) -> dict[str, int]:
    """Return the peak of each of torch's budgets, as it was measured in a run of its own.

    In runs up to November 2026 the loop held the model's output in the backward pass: the peaks of all methods were
    higher by as much as that of the plain step.
    """
    path = _RESULTS / f"{name}-compiled.json"
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())["models"][name]["compiled"]["rows"]
    held_bytes = next(row["activation_peak_bytes"] for row in rows if row["method"] == PLAIN) - plain_bytes
    return {
        row["method"]: bytes_before + row["activation_peak_bytes"] - max(held_bytes, 0)
        for row in rows
        if row["activation_peak_bytes"] is not None and row["method"] not in (PLAIN, PLAIN_AGAIN)
    }


def _facts(profile: memfit.ModelProfile) -> dict[str, Any]:
    """Return what the profile says of compiling."""
    if profile.compiled is None:
        return {"num_ops": len(profile.ops)}
    return {
        "num_ops": len(profile.ops),
        "link": None if profile.link is None else asdict(profile.link),
        "compile_seconds": profile.compiled.compile_seconds,
        "partitions": {kind.name: [each.name for each in kind.partitions] for kind in profile.compiled.kinds},
        "not_compiled": dict(profile.compiled.not_compiled),
    }
