"""What a report is made from: a profile, plans for it, and baselines to compare them with. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything on one page.

    ``points`` may come in any order. ``chosen`` is the plan in use; it is put among the points and the page opens on
    it. Without one, the page opens on the fastest point within ``budget_bytes``, or else on the one that saves most
    memory for its time. ``facts`` are lines about the machine and the versions, as ``environment_facts()`` gives them.
    """

    profile: ModelProfile
    points: Sequence[FrontierPoint]
    chosen: FrontierPoint | None = None
    budget_bytes: int | None = None
    marks: Sequence[Mark] = ()
    title: str = "One training step"
    facts: Mapping[str, str] = field(default_factory=dict)
