"""Checks the size that ``memfit.tune`` chooses against a measured grid of sizes.

    python benchmarks/batch_sizes.py [--models gpt,resnet] [--rounds N] [--json PATH]

Each size of the grid runs by the plan that ``memfit.fit`` makes for it at the same budget. All sizes, the chosen one
among them, are timed in interleaved rounds, after one step that does not count. Reported are the throughput of the
chosen size as a share of the best of the grid, with the 25th and 75th percentile of that share over the rounds, its
measured peak as a share of the predicted one, and the seconds that tune took. The exit status is 1 where a peak is
above the budget.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import memfit
from memfit.environment import environment_facts
from memfit.models import gpt, resnet
from memfit.runtime.allocation_meter import allocated_peak
from memfit.units import format_bytes

CPU = torch.device("cpu")
NUM_SIZES = 12


class Case(NamedTuple):
    """A model, what makes its batches, and a budget in multiples of the plain step of one sample."""

    model: nn.Module
    make_batch: Callable[[int], Tensor]
    loss: Callable[[Tensor], Tensor] | None
    num_plain_samples: int


def cases() -> dict[str, Callable[[], Case]]:
    """Return what makes each case."""

    def of_gpt() -> Case:
        model, _ = gpt(layers=4, width=64, heads=4, batch=1, length=128, vocabulary=256)
        return Case(model, lambda size: torch.randint(256, (size, 129)), None, 12)

    def of_resnet() -> Case:
        model, images, _ = resnet(blocks=1, width=16, batch=1, size=32)
        return Case(model, lambda size: torch.randn(size, *images.shape[1:]), lambda output: output.square().mean(), 12)

    return {"gpt": of_gpt, "resnet": of_resnet}


def main() -> int:
    """Tune and measure each model, print a table, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt,resnet")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    found = {name: measured(cases()[name](), options.rounds) for name in options.models.split(",")}
    for name, result in found.items():
        show(name, result)
    if options.json is not None:
        options.json.write_text(json.dumps({"environment": environment_facts(), "models": found}, indent=1) + "\n")
    rows = [row for result in found.values() for row in result["rows"]]
    return 1 if any(row["peak_bytes"] > row["budget_bytes"] for row in rows) else 0


def measured(case: Case, num_rounds: int) -> dict[str, Any]:
    """Return what `memfit.tune` chose, and what was measured of the grid."""
    model, make_batch, loss, num_plain_samples = case
    budget_bytes = memfit.profile(model, make_batch(num_plain_samples), loss=loss, mode="fake").peak_bytes
    begin = time.perf_counter()
    tuned = memfit.tune(model, make_batch, budget=budget_bytes, loss=loss)
    tune_seconds = time.perf_counter() - begin
    tuned.fitted.remove()
    most = max(row.size for row in tuned.table if row.plan is not None)
    grid = sorted({max(1, round(most ** (k / (NUM_SIZES - 1)))) for k in range(NUM_SIZES)})
    # Small sizes round to one another: the largest steps of the grid are split until there are enough.
    while len(grid) < min(NUM_SIZES, most):
        low, high = max(pairwise(grid), key=lambda gap: gap[1] - gap[0])
        grid = sorted({*grid, (low + high) // 2})
    plans = {tuned.size: tuned.fitted.plan}
    for size in grid:
        if size not in plans:
            with memfit.fit(model, make_batch(size), budget=budget_bytes, loss=loss) as fitted:
                plans[size] = fitted.plan
    batches = {size: make_batch(size) for size in plans}

    def step(size: int) -> None:
        output = model(batches[size])
        (output if loss is None else loss(output)).backward()
        model.zero_grad()

    peaks = {}
    seconds: dict[int, list[float]] = {size: [] for size in plans}
    for size, plan in plans.items():
        with memfit.apply(model, plan):
            step(size)
            held = [*model.parameters(), *model.buffers(), batches[size]]
            peaks[size] = allocated_peak(lambda size=size: step(size), CPU, held)
    for number in range(num_rounds):
        for size in sorted(plans, reverse=number % 2 == 1):
            with memfit.apply(model, plans[size]):
                step(size)
                begin = time.perf_counter()
                step(size)
                seconds[size].append(time.perf_counter() - begin)
    best = max(grid, key=lambda size: size / median(seconds[size]))
    shares = [
        (tuned.size / chosen) / (best / other) for chosen, other in zip(seconds[tuned.size], seconds[best], strict=True)
    ]
    low, _, high = quantiles(shares, n=4)
    rows = [
        {
            "size": size,
            "samples_per_second": size / median(seconds[size]),
            "peak_bytes": peaks[size],
            "predicted_peak_bytes": plans[size].predicted_peak_bytes,
            "budget_bytes": budget_bytes,
            "predicted_overhead": plans[size].predicted_overhead,
        }
        for size in sorted(plans)
    ]
    return {
        "budget_bytes": budget_bytes,
        "chosen_size": tuned.size,
        "best_size": best,
        "num_rounds": num_rounds,
        "share_of_best": median(shares),
        "share_of_best_25": low,
        "share_of_best_75": high,
        "peak_share_of_predicted": peaks[tuned.size] / plans[tuned.size].predicted_peak_bytes,
        "tune_seconds": tune_seconds,
        "num_sizes_tried": len(tuned.table),
        "rows": rows,
    }


def show(name: str, result: dict[str, Any]) -> None:
    """Print the grid."""
    title = f"{name} within {format_bytes(result['budget_bytes'])}: tune chose {result['chosen_size']}"
    table = Table("size", "samples/s", "peak", "of predicted", "predicted time", title=title)
    for row in result["rows"]:
        mark = " (chosen)" if row["size"] == result["chosen_size"] else ""
        table.add_row(
            f"{row['size']}{mark}",
            f"{row['samples_per_second']:,.0f}",
            format_bytes(row["peak_bytes"]),
            f"{row['peak_bytes'] / row['predicted_peak_bytes']:.3f}",
            f"{row['predicted_overhead']:+.1%}",
        )
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{result['share_of_best']:.3f} of the best of the grid ({result['share_of_best_25']:.3f} to "
        f"{result['share_of_best_75']:.3f}), tune took {result['tune_seconds']:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
