"""Whether budgets hold in the first three steps of many architectures of transformers.

    python benchmarks/architectures.py [NAME ...] [--json benchmarks/results/architectures.json]

Each model is small (`architecture_models.py`). It is profiled once, and planned for three budgets: the smallest that is
feasible, and 0.5 and 0.8 of the distance from there to the plain peak. Each plan is applied, and three steps of a loop
are run that holds nothing but the loss. Their peaks are what the CPU's allocator reports. A plan is over its budget
where any of the three is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from benchmarks.architecture_models import ARCHITECTURES, build
from rich.console import Console
from rich.table import Table
from tests.loop_peaks import peaks_of_steps

import memfit
from memfit.report.environment import environment_facts
from memfit.units import format_bytes

SHARES = (0.0, 0.5, 0.8)


@dataclass(frozen=True)
class PlannedRow:
    """One plan: the ``share`` of the way from the smallest budget to the plain peak, and the peaks of three steps."""

    share: float
    budget_bytes: int
    predicted_bytes: int
    peak_bytes: list[int]

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
        rows = [_planned(share, profile, lambda: peaks_of_steps(model, batch, loss), model) for share in SHARES]
    except Exception as error:
        traceback.print_exc()
        return ArchitectureRow(name, error=f"{type(error).__name__}: {error}"[:300])
    return ArchitectureRow(name, profile.peak_bytes, plain, round(time.process_time() - begin, 1), rows)


def _planned(share, profile, peaks, model) -> PlannedRow:
    try:
        smallest = memfit.plan(profile, budget=1).predicted_peak_bytes
    except memfit.InfeasibleBudgetError as error:
        smallest = error.minimum_bytes
    budget = round(smallest + share * (profile.peak_bytes - smallest))
    plan = memfit.plan(profile, budget=budget)
    with memfit.apply(model, plan):
        return PlannedRow(share, budget, plan.predicted_peak_bytes, peaks())


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
    if options.json is not None:
        facts = environment_facts() | {"transformers": version("transformers")}
        result = {"environment": facts, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def _line(row: ArchitectureRow) -> str:
    return f"{row.name}: {row.error or ' '.join(f'{plan.over:+.2%}' for plan in row.plans)}"


if __name__ == "__main__":
    main()
