"""memfit's measured trade-off beside what a user would pick instead, on one GPU.

    python benchmarks/frontier.py [MODEL ...] [--out DIR] [--compiled] [--small]

The peak of each eager method of torch is measured first, and memfit is given exactly that peak as its budget. memfit's
own budgets are spread evenly from the peak of saving everything down to the smallest feasible one. All methods are then
timed in interleaved rounds, with steps launched back-to-back; times are medians of CUDA events, peaks are the
allocator's, ratios are to the plain step of the run. A method that raises is noted and left out. Threads are pinned to
one core of the host, or to two (--cores): one for forward passes, one for all other threads.

Each model's results are written to DIR/MODEL.json as soon as they are complete. With --compiled, torch.compile per
block is measured instead, beside the plain step, into DIR/MODEL-compiled.json. With --strategies, memfit's own layer
strategies are the baselines, into DIR/MODEL-strategies.json; with --captured, steps are captured into CUDA graphs, into
DIR/MODEL-captured.json. With --compiled-plans, memfit's plans for compiled blocks are measured, with a chunked loss and
with the host's memory where that is required, into DIR/MODEL-compiled-plans.json. With --offloading, plans that may use
the host's memory are measured too, and written with torch's methods into DIR/MODEL-offloading.json; with --offloading
alone, no other plans are. With --small, the models are tiny and run on the CPU in a minute: to try the script, not for
the numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from frontier_captured import run_captured
from frontier_models import SUBJECTS, Subject
from frontier_plans import enter_plans, enter_strategies, groups_of_plans, plan_data
from frontier_results import GIB, OFFLOADING, PLAIN, PLAIN_AGAIN, REQUIRED_RATIOS, label_at
from measuring import Race, machine, print_rows
from peers import eager_peers, offloaded
from pinning import pinned
from rich.console import Console
from rich.table import Table

import memfit
from memfit.runtime.engine.native_tape import engine_name
from memfit.units import format_bytes

_VERSIONS_OF = ("torch", "transformers", "timm", "torchvision", "numpy", "scipy", "memfit")
# Below so many rounds, quartiles mean nothing.
_FEWEST_ROUNDS = 3
# Methods that take long to enter run all their steps together, as many for each round.
_STEPS_ALONE_IN_A_ROUND = 2
# Plain steps compared with a plain step, to know how far the kernels' own sums stray: about as many as there are plans,
# for the largest of many draws is larger than that of few.
_NUM_GRADIENT_REPEATS = 16


def run(name: str, subject: Subject, options: argparse.Namespace, begin: float) -> dict[str | None, dict[str, Any]]:
    """Measure all methods on one model, and return the results by group. ``begin`` is when building it began."""
    model = subject.model
    clock = _Clock(begin)
    clock.lap("building")
    race = Race(model, subject.output_and_loss, subject.tensors(), keep_gradients=False)
    race.enter(PLAIN, contextlib.nullcontext)
    model.zero_grad()
    profile = memfit.profile(model, subject.batch)
    profiling_seconds = clock.lap("profiling")
    print(f"{name}: {len(profile.ops)} ops profiled in {profiling_seconds:.1f} s", flush=True)
    if options.profiles is not None:
        options.profiles.mkdir(parents=True, exist_ok=True)
        profile.save(options.profiles / f"{name}.profile.json.gz")
    race.enter(PLAIN_AGAIN, contextlib.nullcontext)
    if options.strategies:
        peaks = enter_strategies(race, model, profile)
    else:
        peers = eager_peers(subject.blocks) | dict(subject.switch)
        peaks = {peer: race.enter(peer, method) for peer, method in peers.items() if peer not in options.without}
        if OFFLOADING not in options.without:
            peaks[OFFLOADING] = race.enter(
                OFFLOADING, lambda: offloaded(race.device), slow_limit_seconds=options.slow_limit_seconds
            )
    clock.lap("peaks of peers")
    planned = groups_of_plans(profile, peaks, options)
    for group, plans in planned.items():
        plans.add_at_peaks()
        if not options.strategies and not options.small:
            for activations_gib in REQUIRED_RATIOS.get(name, {}):
                plans.add(label_at(activations_gib), race.bytes_before(PLAIN) + int(activations_gib * GIB))
        # Two groups in one run: the second has to do with about half as many, the middle among them.
        num_points = options.points // 2 + 1 if group is not None and None in planned else options.points
        plans.add_evenly_spread(0 if options.strategies else num_points)
    print(f"{name}: planned in {clock.lap('planning'):.1f} s", flush=True)
    for plans in planned.values():
        enter_plans(race, model, plans)
    clock.lap("peaks of memfit")
    race.compare_gradients(num_repeats=_NUM_GRADIENT_REPEATS)
    clock.lap("gradients")
    num_rounds = race.run_rounds(
        options.rounds,
        steps_per_round=options.steps,
        fewest_rounds=min(_FEWEST_ROUNDS, options.rounds),
        end_by=begin + options.seconds,
    )
    clock.lap("rounds")
    rows = race.rows()
    print_rows(f"{name}, {machine()}", rows)
    print(f"{name}: {num_rounds} rounds; seconds: {clock}", flush=True)
    of_all_groups = {
        "profiling_seconds": profiling_seconds,
        "num_ops": len(profile.ops),
        "profiled_peak_bytes": profile.peak_bytes,
        "profiled_step_seconds": profile.step_seconds,
        "host": None if profile.host is None else asdict(profile.host),
        "link": None if profile.link is None else asdict(profile.link),
        "gradient_noise": race.gradient_noise,
        "kernel_noise": race.kernel_noise,
        "num_rounds": num_rounds,
        "seconds": clock.laps,
        "num_cores": None if race.device.type == "cpu" else options.cores,
    }
    return {group: plans.results(rows) | of_all_groups for group, plans in planned.items()}


def print_predictions(results: dict[str, Any]) -> None:
    table = Table("plan", "budget", "predicted", "measured", "predicted overhead", "measured", "gap")
    for label, plan in results["plans"].items():
        peak, overhead = plan["measured_peak_bytes"], plan["measured_overhead"]
        table.add_row(
            label,
            format_bytes(plan["budget_bytes"]) if plan["budget_bytes"] else "",
            format_bytes(plan["predicted_peak_bytes"]),
            "" if peak is None else format_bytes(peak),
            f"{plan['predicted_overhead']:.3f}",
            "" if overhead is None else f"{overhead:.3f}",
            f"{plan['optimality_gap']:.4f}",
        )
    Console(width=160).print(table)


class _Clock:
    """Where the time of a model goes."""

    def __init__(self, begin: float) -> None:
        self.laps: dict[str, float] = {}
        self._begin = self._last = begin

    def lap(self, name: str) -> float:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self.laps["all"] = now - self._begin
        self._last = now
        return self.laps[name]

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.laps.items())


def versions() -> dict[str, str]:
    """Return the versions of what took part, as far as it is installed."""
    found = {}
    for package in _VERSIONS_OF:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    # Run from a checkout, it need not be installed.
    return found | {"memfit": memfit.__version__}


def let_go(device: torch.device) -> None:
    """Give back what the last model took, so that the next begins as the first did."""
    gc.collect()
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    # save_on_cpu leaves pinned host memory in torch's cache. 2.13 can empty that; in 2.11 only a private name can.
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    elif hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


def run_and_write(name: str, device: torch.device, options: argparse.Namespace) -> None:
    if options.compiled:
        # Here, because it brings in torch's compiler, for which the others need not wait.
        from frontier_compiled import compile_ahead, run_compiled

        if options.ahead:
            compile_ahead(name, options)
    begin = time.perf_counter()
    torch.manual_seed(0)
    subject = SUBJECTS[name](device, small=options.small)
    of_groups: dict[str | None, dict[str, Any]]
    num_steps = options.rounds * (options.steps or _STEPS_ALONE_IN_A_ROUND)
    if options.compiled:
        of_groups = {"compiled": run_compiled(name, subject, options, num_steps)}
    elif options.compiled_plans:
        from frontier_compiled_plans import run_compiled_plans

        of_groups = {"compiled-plans": run_compiled_plans(name, subject, options, begin)}
    elif options.captured:
        of_groups = {"captured": run_captured(name, subject, options.points, num_steps, plan_data)}
    else:
        of_groups = run(name, subject, options, begin)
    for group, results in of_groups.items():
        for each in [results, *results.get("groups", {}).values()]:
            if "plans" in each:
                print_predictions(each)
        if options.out is not None:
            write(options.out, name, group, results)


def write(folder: Path, name: str, group: str | None, results: dict[str, Any]) -> None:
    """Write the results of one model: those of a group of its own beside the others, under its name."""
    measured_at = datetime.now(UTC).isoformat(timespec="minutes")
    about = {"machine": machine(), "versions": versions(), "measured_at": measured_at}
    model = results if group is None else {group: results | about}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (f"{name}.json" if group is None else f"{name}-{group}.json")
    path.write_text(json.dumps(about | {"models": {name: model}}, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(SUBJECTS)}; default: all")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write MODEL.json here, after each model")
    parser.add_argument("--profiles", type=Path, metavar="DIR", help="save the profiles here, to plan them elsewhere")
    parser.add_argument("--compiled", action="store_true", help="measure torch.compile per block instead")
    parser.add_argument(
        "--compiled-plans", action="store_true", help="measure memfit's plans for compiled blocks instead"
    )
    parser.add_argument("--captured", action="store_true", help="measure steps captured into CUDA graphs instead")
    parser.add_argument("--strategies", action="store_true", help="measure memfit's layer strategies as the peers")
    parser.add_argument(
        "--offloading",
        nargs="?",
        const="beside",
        choices=("beside", "alone"),
        help="measure plans that may use the host's memory, too, or alone",
    )
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU, to try the script")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, help="timed steps of each method in a round (default: for 0.4 s, at least 2)"
    )
    parser.add_argument("--points", type=int, default=9, help="memfit's own budgets; an odd number has the middle")
    parser.add_argument(
        "--seconds",
        type=float,
        default=100.0,
        help=f"for one model; where they run out, there are fewer rounds, but at least {_FEWEST_ROUNDS} (default: 100)",
    )
    parser.add_argument(
        "--slow-limit-seconds",
        type=float,
        default=5.0,
        help="a slow method (save_on_cpu) whose first step takes longer is not timed (default: 5)",
    )
    parser.add_argument(
        "--cores",
        type=int,
        choices=(1, 2),
        default=2,
        help="cores of the host to pin to: one for all threads, or a second for backward passes (default: 2)",
    )
    parser.add_argument("--without", action="append", default=[], metavar="WAY", help="leave out a peer, by its name")
    parser.add_argument(
        "--budget-seconds", type=float, default=60.0, help="with --compiled, for each of torch's budgets (default: 60)"
    )
    parser.add_argument(
        "--budget",
        action="append",
        type=float,
        metavar="SHARE",
        help="with --compiled, this of torch's budgets instead of all; may be given again",
    )
    parser.add_argument(
        "--ahead",
        type=int,
        default=0,
        metavar="PROCESSES",
        help="with --compiled, first compile the budgets into torch's cache, so many at once; each takes the GPU's "
        "memory for one plain step",
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.models) - set(SUBJECTS))
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(SUBJECTS)}")
    if not options.small and not torch.cuda.is_available():
        parser.error("torch finds no GPU here; --small tries the script on the CPU")
    device = torch.device("cpu" if options.small else "cuda")
    # Gradients are compared with sums in a fixed order, for which cuBLAS wants this, which is what a Hopper GPU has
    # anyway, and before its first call.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if options.small:
        # A handful of numbers is slower, not faster, on several threads.
        torch.set_num_threads(1)
    if options.compiled or options.compiled_plans:
        # The compiler has processes of its own, and takes minutes on all cores.
        return measure_models(device, options)
    # Build the engine, if need be, before the process is pinned.
    engine_name()
    with pinned(device, options.cores):
        return measure_models(device, options)


def measure_models(device: torch.device, options: argparse.Namespace) -> int:
    """Measure one model after the other; return the exit status."""
    failed = []
    for name in options.models or SUBJECTS:
        try:
            run_and_write(name, device, options)
        except ModuleNotFoundError as error:
            print(f"{name}: left out, {error.name} is not installed", flush=True)
        except Exception:
            # The other models are still worth their time.
            traceback.print_exc()
            failed.append(name)
        let_go(device)
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
