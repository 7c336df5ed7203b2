"""How close predicted peaks are to measured ones, and nothing else: half a minute a model on a GPU.

    python benchmarks/peaks.py [MODEL ...] [--points 12] [--out FILE] [--small]

The models are those of frontier.py. Plans are made for budgets spread evenly from the peak of the plain step down to
the smallest, and each runs two steps. With --small, the models are tiny and run on the CPU, where peaks are the same to
the byte.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

import torch
from frontier_models import SUBJECTS, Subject
from measuring import Race, machine
from rich.console import Console
from rich.table import Table

import memfit

MIB = 2**20


def measured_peaks(subject: Subject, num_points: int) -> list[dict[str, float]]:
    """Return budgets, predicted and measured peaks of plans for one model, in MiB."""
    model = subject.model
    race = Race(model, subject.output_and_loss, subject.tensors(), keep_gradients=False)
    race.enter("plain", contextlib.nullcontext)
    model.zero_grad()
    profile = memfit.profile(model, subject.batch)
    largest, *_, smallest = (point.peak_bytes for point in memfit.frontier(profile, points=2))
    found = []
    for number in range(1, num_points):
        budget_bytes = largest - (largest - smallest) * number // (num_points - 1)
        plan = memfit.plan(profile, budget=budget_bytes)
        peak_bytes = race.enter(f"plan {number}", lambda plan=plan: memfit.apply(model, plan))
        if peak_bytes is None:
            raise RuntimeError(f"the plan for {budget_bytes} bytes failed")
        in_bytes = {"budget": budget_bytes, "predicted": plan.predicted_peak_bytes, "measured": peak_bytes}
        found.append({f"{name}_mib": num_bytes / MIB for name, num_bytes in in_bytes.items()})
    return found


def print_peaks(name: str, peaks: list[dict[str, float]]) -> None:
    table = Table("budget MiB", "predicted", "measured", "too high by", "", title=f"{name}, {machine()}")
    for row in peaks:
        left = row["predicted_mib"] - row["measured_mib"]
        sizes = [f"{row[key]:.1f}" for key in ("budget_mib", "predicted_mib", "measured_mib")]
        table.add_row(*sizes, f"{left:+.1f}", f"{left / row['measured_mib']:+.2%}")
    Console(width=110).print(table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(SUBJECTS)}; default: all")
    parser.add_argument("--points", type=int, default=12, help="budgets, the plain step's peak among them")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the peaks of all models there, as JSON")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU, to try the script")
    options = parser.parse_args(arguments)
    device = torch.device("cpu" if options.small else "cuda")
    peaks = {}
    for name in options.models or SUBJECTS:
        torch.manual_seed(0)
        peaks[name] = measured_peaks(SUBJECTS[name](device, small=options.small), options.points)
        print_peaks(name, peaks[name])
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": machine(), "models": peaks}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
