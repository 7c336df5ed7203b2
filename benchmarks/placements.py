"""Where on the host a plain step runs best: as it comes, or on one or two cores that are kept awake.

    python benchmarks/placements.py [MODEL ...] [--rounds N] [--out FILE]

The placements take turns, round after round. Told are the median milliseconds until the forward pass of a step alone is
launched, and of a step in a row of them. `frontier.py` should run where the former is least (`--cores`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import torch
from frontier_models import SUBJECTS, Subject
from measuring import machine
from quiet_host import QuietHost
from rich.console import Console
from rich.table import Table

PLACEMENTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "as it comes": contextlib.nullcontext,
    "one core, awake": lambda: QuietHost(1).held(),
    "two cores, awake": lambda: QuietHost(2).held(),
}
# Until a turn is warm.
_SECONDS_BEFORE = 0.3
_STEPS_ALONE, _STEPS_IN_A_ROW = 8, 12


def turn(subject: Subject) -> tuple[list[float], list[float]]:
    """Return the milliseconds of launching forward passes, and of steps in a row."""

    def forward() -> torch.Tensor:
        return subject.output_and_loss()[1]

    def step() -> None:
        forward().backward()
        subject.model.zero_grad()

    begin = time.perf_counter()
    while time.perf_counter() - begin < _SECONDS_BEFORE:
        step()
    launched = []
    for _ in range(_STEPS_ALONE):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = forward()
        launched.append(1e3 * (time.perf_counter() - begin))
        loss.backward()
        subject.model.zero_grad()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_STEPS_IN_A_ROW + 1)]
    for event in events:
        step()
        event.record()
    torch.cuda.synchronize()
    return launched, [first.elapsed_time(second) for first, second in pairwise(events)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["mixtral", "resnet-152"], metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in options.models:
        torch.manual_seed(0)
        subject = SUBJECTS[name](torch.device("cuda"), small=False)
        launched: dict[str, list[float]] = defaultdict(list)
        in_a_row: dict[str, list[float]] = defaultdict(list)
        for _ in range(options.rounds):
            for placement, held in PLACEMENTS.items():
                with held():
                    of_turn = turn(subject)
                launched[placement] += of_turn[0]
                in_a_row[placement] += of_turn[1]
        results[name] = {
            placement: {
                "forward_launched_ms": statistics.median(launched[placement]),
                "step_ms": statistics.median(in_a_row[placement]),
            }
            for placement in PLACEMENTS
        }
        table = Table("placement", "forward launched ms", "step ms", title=f"{name}, {machine()}")
        for placement, told in results[name].items():
            table.add_row(placement, *(f"{milliseconds:.1f}" for milliseconds in told.values()))
        Console().print(table)
        del subject
        torch.cuda.empty_cache()
    if options.out is not None:
        about = {"machine": machine(), "measured_at": datetime.now(UTC).isoformat(timespec="minutes")}
        options.out.write_text(json.dumps(about | {"models": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
