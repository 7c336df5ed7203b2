"""Whether budgets hold in the first three steps of many architectures of transformers.

    python benchmarks/architectures.py [NAME ...] [--json benchmarks/results/architectures.json]

Each model is small (`architecture_models.py`). It is profiled once, and planned for three budgets: the smallest that is
feasible, and 0.5 and 0.8 of the distance from there to the plain peak. Each plan is applied, and three steps of a loop
are run that holds nothing but the loss. Their peaks are what the CPU's allocator reports. A plan is over its budget
where any of the three is. One more step, with the random numbers of a plain one, shows whether gradients and buffers
are bit for bit the plain step's.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy
import torch
from benchmarks.architecture_models import ARCHITECTURES, build
from rich.console import Console
from rich.table import Table
from tests.loop_peaks import peaks_of_steps
from torch import Tensor

import memfit
from memfit.environment import environment_facts
from memfit.units import format_bytes

SHARES = (0.0, 0.5, 0.8)


@dataclass(frozen=True)
class PlannedRow:
    """One plan: the ``share`` of the way from the smallest budget to the plain peak, and the peaks of three steps."""

    share: float
    budget_bytes: int
    predicted_bytes: int
    peak_bytes: list[int]
    is_bit_identical: bool

    @property
    def over(self) -> float:
        """By which share of the budget the highest peak is above it; negative below."""
        return max(self.peak_bytes) / self.budget_bytes - 1


@dataclass(frozen=True)
class ArchitectureRow:
    """One architecture: the peak that the profile says, those of three plain steps, and the plans."""

    name: str
    profiled_bytes: int = 0
    plain_bytes: list[int] = field(default_factory=list)
    cpu_seconds: float = 0.0
    plans: list[PlannedRow] = field(default_factory=list)
    error: str | None = None


def measured(name: str) -> ArchitectureRow:
    """Return what the budgets of one architecture came to."""
    begin = time.process_time()
    try:
        model, batch, loss = build(name)
        plain = peaks_of_steps(model, batch, loss)
        profile = memfit.profile(model, batch, loss=loss)
        known = copy.deepcopy(model.state_dict())
        expected = _results_of_step(model, batch, loss, known)
        rows = []
        for share in SHARES:
            budget, plan = _plan(share, profile)
            with memfit.apply(model, plan):
                peaks = peaks_of_steps(model, batch, loss)
                results = _results_of_step(model, batch, loss, known)
            rows.append(PlannedRow(share, budget, plan.predicted_peak_bytes, peaks, _are_equal(results, expected)))
    except Exception as error:
        traceback.print_exc()
        return ArchitectureRow(name, error=f"{type(error).__name__}: {error}"[:300])
    return ArchitectureRow(name, profile.peak_bytes, plain, round(time.process_time() - begin, 1), rows)


def _plan(share: float, profile: memfit.ModelProfile) -> tuple[int, memfit.Plan]:
    try:
        smallest = memfit.plan(profile, budget=1).predicted_peak_bytes
    except memfit.InfeasibleBudgetError as error:
        smallest = error.minimum_bytes
    # The plain step may be predicted a little above what was measured: workspaces count in full.
    budget = round(smallest + share * max(0, profile.peak_bytes - smallest))
    return budget, memfit.plan(profile, budget=budget)


def _results_of_step(model, batch, loss, known) -> dict[str, Tensor | None]:
    """Return the loss, the gradients and the buffers of a step that begins with the state ``known`` and one seed."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(known[name])
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    value = loss(model(**batch))
    value.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {"loss": value.detach(), **gradients, **{name: each.clone() for name, each in model.named_buffers()}}


def _are_equal(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> bool:
    return one.keys() == other.keys() and all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a.nan_to_num(), b.nan_to_num()))
        for a, b in ((one[name], other[name]) for name in one)
    )


def table_of(rows: list[ArchitectureRow]) -> Table:
    """Return the rows as a table."""
    table = Table("architecture", "plain", "profiled", *(f"budget {share:g}" for share in SHARES))
    for row in rows:
        if row.error is not None:
            table.add_row(row.name, row.error[:80])
            continue
        cells = [f"{plan.over:+.2%} of {format_bytes(plan.budget_bytes)}" for plan in row.plans]
        plain = max(row.plain_bytes)
        table.add_row(row.name, format_bytes(plain), f"{row.profiled_bytes / plain - 1:+.2%}", *cells)
    return table


def markdown(result: dict[str, Any]) -> str:
    """Return the table of docs/results/architectures.md."""
    rows = result["rows"]
    plans = [plan for row in rows for plan in row["plans"]]
    over = [_over(plan) for plan in plans if _over(plan) > 0]
    facts = result["environment"]
    lines = [
        f"{len(rows)} small models of transformers {facts['transformers']} on a CPU, PyTorch {facts['torch']}, three "
        f"budgets each, three steps of a training loop by each plan (`benchmarks/architectures.py`). {len(over)} of "
        f"{len(plans)} plans are over their budget in some step, by {max(over, default=0):.2%} at most. "
        f"{sum(not plan['is_bit_identical'] for plan in plans)} of them change a gradient or a buffer. A cell is the "
        "highest peak of the three steps, compared with the budget.",
        "",
        "| architecture | plain peak | smallest budget | half of the way to the plain peak | 0.8 of it |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [f"{_over(plan):+.2%} of {format_bytes(plan['budget_bytes'])}" for plan in row["plans"]]
        cells = [f"failed: {row['error']}"] if row["error"] else [format_bytes(max(row["plain_bytes"])), *cells]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _over(plan: dict[str, Any]) -> float:
    return max(plan["peak_bytes"]) / plan["budget_bytes"] - 1


def main() -> None:
    """Measure, print a table, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures, all where none is named")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    console = Console(width=140)
    rows = []
    for name in options.names or ARCHITECTURES:
        rows.append(measured(name))
        console.print(_line(rows[-1]))
    console.print(table_of(rows))
    plans = [plan for row in rows for plan in row.plans]
    over = [plan for plan in plans if plan.over > 0]
    console.print(f"{len(over)} of {len(plans)} plans of {len(rows)} architectures are over their budget in some step")
    console.print(f"{sum(not plan.is_bit_identical for plan in plans)} of them change gradients or buffers")
    if options.json is not None:
        facts = environment_facts() | {"transformers": version("transformers")}
        result = {"environment": facts, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def _line(row: ArchitectureRow) -> str:
    cells = [f"{plan.over:+.2%}{'' if plan.is_bit_identical else ' OTHER GRADIENTS'}" for plan in row.plans]
    return f"{row.name}: {row.error or ' '.join(cells)} ({row.cpu_seconds:.0f} s of CPU)"


if __name__ == "__main__":
    main()
