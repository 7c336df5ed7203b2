"""How long plans over layers take: each strategy on 10^3 to 10^5 layers, a binomial sweep, and the import.

    python benchmarks/layers.py [--json results.json]

Timed is what a caller does: the plan, both estimates and the statistics. Every number is the best of several runs on
one core, since whatever else the machine does only adds to it. The growth exponent is the slope between 10^4 and 10^5
layers: 1 is linear.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

import memfit
from memfit.environment import processor_name
from memfit.layers.checkpointing.backward_sweep import backward_sweep
from memfit.layers.checkpointing.revolve import binomial_states
from memfit.layers.examples import gpt_layers
from memfit.layers.strategies import LayerStrategy

NUMS_LAYERS = (1_000, 10_000, 100_000)
# From 10^4 to 4 * 10^5 layers the cost of a layer about doubles, and then stays: only beyond does the exponent count.
NUMS_LAYERS_VERY_LONG = (400_000, 800_000)
NUM_RUNS = 5
SWEEP_NUM_LAYERS = 1_000
SWEEP_NUM_SLOTS = 10
# Each in a fresh interpreter; what the interpreter itself takes is measured alike and taken off.
NUM_IMPORTS = 15


def random_layers(num_layers: int) -> list[memfit.LayerMemoryProfile]:
    """Return layers no two of which are alike: sizes to 1 GB and costs to 1 TFLOP, log-uniform."""
    rng = random.Random(num_layers)
    kinds = list(memfit.LayerTypeHint)
    return [
        memfit.LayerMemoryProfile(i, rng.choice(kinds), int(10 ** rng.uniform(3, 9)), int(10 ** rng.uniform(6, 12)))
        for i in range(num_layers)
    ]


def transformer_layers(num_layers: int) -> list[memfit.LayerMemoryProfile]:
    """Return a GPT of about that many layers: four kinds, repeated."""
    return list(gpt_layers(num_blocks=num_layers // 4, width=4096, num_heads=32))[:num_layers]


def half_of(layers: list[memfit.LayerMemoryProfile]) -> memfit.Budget:
    return memfit.Budget.from_bytes(sum(layer.activation_size_bytes for layer in layers) // 2)


CASES: dict[
    str,
    tuple[Callable[[int], list[memfit.LayerMemoryProfile]], Callable[[list[memfit.LayerMemoryProfile]], LayerStrategy]],
] = {
    "none": (random_layers, lambda _: memfit.NoCheckpointing()),
    "full": (random_layers, lambda _: memfit.Full()),
    "selective:0.5": (random_layers, lambda _: memfit.Selective(0.5)),
    "attention": (random_layers, lambda _: memfit.AttentionOnly()),
    "ffn": (random_layers, lambda _: memfit.FfnOnly()),
    "every-nth:2": (random_layers, lambda _: memfit.EveryNthLayer(2)),
    "largest:N/2": (random_layers, lambda layers: memfit.LargestLayers(len(layers) // 2)),
    "sqrt": (random_layers, lambda _: memfit.SqrtLayers()),
    "budget, random": (random_layers, half_of),
    "budget, GPT": (transformer_layers, half_of),
}


def best_seconds(work: Callable[[], object]) -> float:
    """Return the least time of several runs."""
    times = []
    for _ in range(NUM_RUNS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def plan_and_judge(layers: list[memfit.LayerMemoryProfile], strategy: LayerStrategy) -> memfit.CheckpointPlan:
    plan = memfit.build_checkpoint_plan(layers, strategy)
    memfit.estimate_memory_with_plan(layers, plan)
    memfit.estimate_total_recompute_flops(layers, plan)
    memfit.activation_stats(layers, plan)
    return plan


def plan_sweep() -> None:
    """Plan where a forward pass stores, and the backward sweep from there."""
    stored = binomial_states(SWEEP_NUM_LAYERS, SWEEP_NUM_SLOTS)
    list(backward_sweep(SWEEP_NUM_LAYERS, SWEEP_NUM_SLOTS, stored))


def measure_strategies() -> dict[str, dict[str, object]]:
    results: dict[str, dict[str, object]] = {}
    for label, (make_layers, make_strategy) in CASES.items():
        seconds, gaps = {}, {}
        for num_layers in NUMS_LAYERS:
            layers = make_layers(num_layers)
            strategy = make_strategy(layers)
            gaps[num_layers] = plan_and_judge(layers, strategy).optimality_gap
            seconds[num_layers] = best_seconds(
                lambda layers=layers, strategy=strategy: plan_and_judge(layers, strategy)
            )
        growth = math.log10(seconds[NUMS_LAYERS[-1]] / seconds[NUMS_LAYERS[-2]])
        results[label] = {"seconds": seconds, "growth_exponent": growth, "optimality_gap": gaps}
    return results


def measure_growth_of_very_long_lists() -> dict[str, float]:
    """Return the growth exponent of strategies that only pass over the list, between two very long lists."""
    fewer, more = (random_layers(num_layers) for num_layers in NUMS_LAYERS_VERY_LONG)
    growth = {}
    for label in ("full", "every-nth:2", "sqrt"):
        strategy = CASES[label][1](fewer)
        seconds = [best_seconds(functools.partial(plan_and_judge, layers, strategy)) for layers in (fewer, more)]
        growth[label] = math.log2(seconds[1] / seconds[0])
    return growth


def measure_import_seconds() -> float:
    """Return what ``import memfit`` adds to a bare interpreter."""

    def interpreter_seconds(statement: str) -> float:
        times = []
        for _ in range(NUM_IMPORTS):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            times.append(time.perf_counter() - start)
        return min(times)

    return interpreter_seconds("import memfit") - interpreter_seconds("pass")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time plans over layers.")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    results = {
        "machine": f"{processor_name()}, one core, {platform.system()}",
        "versions": {"memfit": memfit.__version__, "python": platform.python_version(), "numpy": version("numpy")},
        "strategies": measure_strategies(),
        "growth_exponents_of_very_long_lists": measure_growth_of_very_long_lists(),
        "binomial_sweep": {
            "num_layers": SWEEP_NUM_LAYERS,
            "num_slots": SWEEP_NUM_SLOTS,
            "seconds": best_seconds(plan_sweep),
        },
        "import_seconds": measure_import_seconds(),
    }
    show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def show(results: dict[str, object]) -> None:
    table = Table(title=f"Plan, estimates and stats, in milliseconds ({results['machine']})")
    table.add_column("strategy")
    for num_layers in NUMS_LAYERS:
        table.add_column(f"{num_layers:,} layers", justify="right")
    table.add_column("growth exponent", justify="right")
    table.add_column("optimality gap", justify="right")
    for label, row in results["strategies"].items():
        milliseconds = [f"{1000 * row['seconds'][num_layers]:.1f}" for num_layers in NUMS_LAYERS]
        gap = f"{max(row['optimality_gap'].values()):.1e}" if label.startswith("budget") else ""
        table.add_row(label, *milliseconds, f"{row['growth_exponent']:.2f}", gap)
    console = Console()
    console.print(table)
    fewer, more = NUMS_LAYERS_VERY_LONG
    growth = ", ".join(
        f"{label} {exponent:.2f}" for label, exponent in results["growth_exponents_of_very_long_lists"].items()
    )
    console.print(f"Growth exponents from {fewer:,} to {more:,} layers: {growth}.")
    sweep = results["binomial_sweep"]
    console.print(
        f"A binomial sweep of {sweep['num_layers']} layers with {sweep['num_slots']} slots is planned in "
        f"{1000 * sweep['seconds']:.1f} ms; import memfit takes {1000 * results['import_seconds']:.0f} ms."
    )


if __name__ == "__main__":
    main()
