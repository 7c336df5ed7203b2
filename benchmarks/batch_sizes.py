"""Checks the size that ``memfit.tune`` chooses against a measured grid of sizes.

    python benchmarks/batch_sizes.py [NAME ...] [--rounds N] [--json PATH] [--small]

On the CPU the models are a small GPT and a small ResNet; on a GPU they are those of the frontier benchmark, at 40 GiB.
Each size of the grid runs by the plan that memfit makes for it at the same budget. All sizes, the chosen one among
them, are timed in interleaved rounds, after one step that does not count. Reported are the throughput of the chosen
size as a share of the best of the grid, with the 25th and 75th percentile of that share over the rounds, its measured
peak as a share of the predicted one, and the seconds that tune took. The exit status is 1 where a peak is above the
budget or a model failed. With --small, the frontier benchmark's models are tiny and run on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
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
from memfit.capture.measuring.clocks import wait_for
from memfit.environment import environment_facts
from memfit.models import gpt, resnet
from memfit.runtime.allocation_meter import allocated_peak
from memfit.runtime.applying.batch_tensors import tensors_of
from memfit.units import format_bytes

NUM_SIZES = 12
BUDGET_ON_GPU = 40 * 2**30
NUM_PLAIN_SAMPLES = 12
"""Elsewhere the budget is the peak of the plain step with so many samples."""


class Case(NamedTuple):
    """A model, what makes its batches, what makes a loss of its output, and the budget."""

    model: nn.Module
    make_batch: Callable[[int], Any]
    loss: Callable[[Any], Tensor] | None
    budget_bytes: int


def gpt_on_cpu() -> Case:
    model, _ = gpt(layers=4, width=64, heads=4, batch=1, length=128, vocabulary=256)
    return with_budget(model, lambda size: torch.randint(256, (size, 129)), None)


def resnet_on_cpu() -> Case:
    model, images, _ = resnet(blocks=1, width=16, batch=1, size=32)
    return with_budget(model, lambda size: torch.randn(size, *images.shape[1:]), lambda output: output.square().mean())


def of_frontier(name: str, *, small: bool) -> Case:
    """Return a model of the frontier benchmark, whose batches of other sizes repeat samples of its own."""
    # transformers, timm and torchvision are needed here only.
    from frontier_models import SUBJECTS

    subject = SUBJECTS[name](torch.device("cpu" if small else "cuda"), small=small)

    def make_batch(size: int) -> Any:
        def resized(tensor: Tensor) -> Tensor:
            rows = torch.arange(size, device=tensor.device) % len(tensor)
            is_image = tensor.dim() == 4
            return tensor[rows].contiguous(memory_format=torch.channels_last) if is_image else tensor[rows]

        if isinstance(subject.batch, dict):
            return {key: resized(tensor) for key, tensor in subject.batch.items()}
        return tuple(resized(tensor) for tensor in subject.batch)

    if small:
        return with_budget(subject.model, make_batch, loss_of)
    return Case(subject.model, make_batch, loss_of, BUDGET_ON_GPU)


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model's output, or the output that is the loss."""
    return output if isinstance(output, Tensor) else output.loss


def with_budget(model: nn.Module, make_batch: Callable[[int], Any], loss: Callable[[Any], Tensor] | None) -> Case:
    """Return a case whose budget some samples keep without a plan."""
    profile = memfit.profile(model, make_batch(NUM_PLAIN_SAMPLES), loss=loss)
    return Case(model, make_batch, loss, profile.peak_bytes)


ON_CPU: dict[str, Callable[[], Case]] = {"gpt": gpt_on_cpu, "resnet": resnet_on_cpu}
OF_FRONTIER = ("llama-2048", "resnet-152", "mixtral")


def main() -> int:
    """Tune and measure each model, print a table, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    of_device = OF_FRONTIER if torch.cuda.is_available() else tuple(ON_CPU)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join((*ON_CPU, *OF_FRONTIER))}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = {}
    for name in options.names or of_device:
        torch.manual_seed(0)
        try:
            case = ON_CPU[name]() if name in ON_CPU else of_frontier(name, small=options.small)
            found[name] = measured(case, options.rounds)
        except Exception:
            # The other models are still worth their time.
            traceback.print_exc()
            continue
        show(name, found[name])
        if options.json is not None:
            facts = environment_facts()
            if torch.cuda.is_available():
                facts["GPU"] = torch.cuda.get_device_name()
            options.json.write_text(json.dumps({"environment": facts, "models": found}, indent=1) + "\n")
        del case
        gc.collect()
        torch.cuda.empty_cache()
    rows = [row for result in found.values() for row in result["rows"]]
    num_failed = len(options.names or of_device) - len(found)
    return 1 if num_failed or any(row["peak_bytes"] > row["budget_bytes"] for row in rows) else 0


def measured(case: Case, num_rounds: int) -> dict[str, Any]:
    """Return what `memfit.tune` chose, and what was measured of the grid."""
    model, make_batch, loss, budget_bytes = case
    device = next(model.parameters()).device
    begin = time.perf_counter()
    tuned = memfit.tune(model, make_batch, budget=budget_bytes, loss=loss)
    wait_for(device)
    tune_seconds = time.perf_counter() - begin
    tuned.fitted.remove()
    print(f"tune chose {tuned.size} of {len(tuned.table)} sizes after {tune_seconds:.1f} s", flush=True)
    plans = {row.size: row.plan for row in tuned.table if row.plan is not None}
    # Where tune tried fewer sizes, the widest gaps between them are split.
    while len(plans) < min(NUM_SIZES, max(plans)):
        low, high = max(((low, high) for low, high in pairwise(sorted(plans)) if high > low + 1), key=ratio_of)
        size = (low + high) // 2
        plans[size] = memfit.plan(memfit.profile(model, make_batch(size), loss=loss), budget=budget_bytes)
    steps = {size: Step(model, make_batch(size), loss) for size in plans}
    peaks: dict[int, int] = {}
    seconds: dict[int, list[float]] = {size: [] for size in plans}
    for number in range(num_rounds + 1):
        for size in sorted(plans, reverse=number % 2 == 1):
            with memfit.apply(model, plans[size]):
                steps[size]()
                if number == 0:
                    peaks[size] = allocated_peak(steps[size], device, steps[size].held())
                    continue
                wait_for(device)
                begin = time.perf_counter()
                steps[size]()
                wait_for(device)
                seconds[size].append(time.perf_counter() - begin)
    best = max(plans, key=lambda size: size / median(seconds[size]))
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


def ratio_of(gap: tuple[int, int]) -> float:
    low, high = gap
    return high / low


class Step:
    """A training step on a batch, without an optimizer."""

    def __init__(self, model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None) -> None:
        self._model, self._batch, self._loss = model, batch, loss

    def __call__(self) -> None:
        batch = self._batch
        if isinstance(batch, dict):
            output = self._model(**batch)
        else:
            output = self._model(*batch) if isinstance(batch, tuple) else self._model(batch)
        loss = output if self._loss is None else self._loss(output)
        # Nothing but the loss is held in the backward pass.
        del output
        loss.backward()
        self._model.zero_grad()

    def held(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers(), *tensors_of(self._batch)]


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
