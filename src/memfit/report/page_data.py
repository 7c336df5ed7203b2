"""What a report is made from: a profile, plans for it, and baselines to compare them with. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import FrontierPoint


@dataclass(frozen=True, slots=True)
class Mark:
    """A baseline or a measurement, shown beside the frontier.

    ``overhead`` is the seconds added, as a share of the plain step's. ``note`` is a few words more, such as whether
    gradients were equal. ``overhead_quartiles`` are the 25th and the 75th percentile of the rounds, where measured.
    """

    label: str
    peak_bytes: int
    overhead: float
    is_measured: bool = False
    note: str = ""
    overhead_quartiles: tuple[float, float] | None = None


class SizeRow(NamedTuple):
    """One size of the batch: its peak, and its samples per second or its overhead; None where no plan fits."""

    size: int
    peak_bytes: int | None
    speed: float | None
    is_measured: bool = False


@dataclass(frozen=True, slots=True)
class SizeCurve:
    """Peak and speed over the size of the batch, by ascending size.

    ``is_throughput`` where the speed is in samples per second, as `tune` measures it, and ``chosen_size`` is the one
    with the most. Else it is the overhead of each size's plan, as `fit` with several batches makes them.
    """

    rows: Sequence[SizeRow]
    chosen_size: int
    budget_bytes: int | None
    is_throughput: bool


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything on one page.

    ``points`` may come in any order. ``chosen`` is the plan in use; it is put among the points and the page opens on
    it. Without one, the page opens on the fastest point within ``budget_bytes``, or else on the one that saves most
    memory for its time. ``facts`` are lines about the machine and the versions, as ``environment_facts()`` gives them.
    With ``sizes``, what the batch's size costs and brings is drawn first.
    """

    profile: ModelProfile
    points: Sequence[FrontierPoint]
    chosen: FrontierPoint | None = None
    budget_bytes: int | None = None
    marks: Sequence[Mark] = ()
    title: str = "One training step"
    facts: Mapping[str, str] = field(default_factory=dict)
    sizes: SizeCurve | None = None
