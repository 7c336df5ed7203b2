"""A plan as data: for every value of the step, what to do with it. No torch, and nothing here decides."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, TypeAlias

from memfit.documents import write_text
from memfit.graph.compiled_data.compiled_blocks import CompiledPlan
from memfit.graph.inputs import Input
from memfit.graph.outline import StepOutline
from memfit.graph.records import Count, Gap, NumberRange
from memfit.graph.summaries import html_summary, text_summary
from memfit.units import format_bytes, format_overhead

_Overhead: TypeAlias = Annotated[float, NumberRange("a number, at least -1", -1.0, sys.float_info.max)]


class Decision(StrEnum):
    """What to do with a value between the op that made it and the backward pass."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    COMPRESS = "compress"


_PARTICIPLES = {
    Decision.SAVE: "saved",
    Decision.RECOMPUTE: "recomputed",
    Decision.OFFLOAD: "offloaded",
    Decision.COMPRESS: "compressed",
}


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """What to do with every value of a model's forward pass, and what that is predicted to give.

    ``decisions`` maps value names (``module.path::aten.op#k``) to decisions, in the order in which the values were
    made. ``recorded_modules`` are the modules in which the engine records ops, ``hooked_modules`` those in which it
    installs saved-tensor hooks. ``fingerprint`` is that of the model it is for. ``predicted_peak_bytes`` is the peak of
    the whole step, parameters included; ``predicted_overhead`` the seconds added, as a share of the plain step;
    ``optimality_gap`` bounds how much of the plain step it is at most slower than the fastest plan of that peak or
    budget. ``budget_bytes`` is what it was planned for, None for a strategy. ``inputs`` are the tensors that the model
    was called with when it was profiled: for others, gradients are right, and the prediction does not hold.

    Offloaded values take ``host_bytes`` of the host's pinned memory. At most ``window_bytes`` of them are on their way
    at a time: out of the device in the forward pass, and fetched ahead of their reader in the backward pass.
    With ``chunks_loss``, a language model's head and loss are computed in chunks of tokens.
    ``outline`` has the op calls of the profiled step, by which the engine finds the values.

    ``compiled`` has the blocks that run compiled, each with the partition that it uses; None where none does.
    """

    decisions: Mapping[str, Decision]
    recorded_modules: tuple[str, ...]
    hooked_modules: tuple[str, ...]
    recompute_flops: Count
    fingerprint: str
    predicted_peak_bytes: Count = 0
    predicted_overhead: _Overhead = 0.0
    optimality_gap: Gap = 0.0
    budget_bytes: Count | None = None
    inputs: tuple[Input, ...] = ()
    host_bytes: Count = 0
    window_bytes: Count = 0
    chunks_loss: bool = False
    outline: StepOutline | None = field(default=None, compare=False)
    compiled: CompiledPlan | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path`` as JSON with one decision a line, all of it or nothing."""
        from memfit.graph.plan_file import plan_text

        write_text(path, plan_text(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Return the plan in the file at ``path``; what is wrong with it is a ``PlanFileError`` with the place."""
        from memfit.graph.plan_file import load_plan

        return load_plan(path)

    @property
    def changes_anything(self) -> bool:
        """Whether any value is not saved, or any block runs compiled."""
        return self.compiled is not None or any(decision is not Decision.SAVE for decision in self.decisions.values())

    @property
    def recomputed_names(self) -> tuple[str, ...]:
        """The names of the values that are recomputed."""
        return tuple(name for name, decision in self.decisions.items() if decision is Decision.RECOMPUTE)

    def summary_lines(self) -> dict[str, str]:
        """Return what is predicted and decided, a few words for each."""
        counts = Counter(self.decisions.values())
        decided = ", ".join(f"{counts[each]} {_PARTICIPLES[each]}" for each in Decision if counts[each])
        lines = {"peak": f"{format_bytes(self.predicted_peak_bytes)} predicted"}
        if self.budget_bytes is not None:
            lines["budget"] = format_bytes(self.budget_bytes)
        lines["time"] = f"{format_overhead(self.predicted_overhead)} predicted"
        lines["values"] = decided or "none"
        if self.chunks_loss:
            lines["loss"] = "in chunks of tokens"
        if self.compiled is not None:
            lines["compiled"] = self.compiled.in_words()
        if self.host_bytes:
            lines["host"] = f"{format_bytes(self.host_bytes)} of pinned memory"
        return lines

    def __repr__(self) -> str:
        return text_summary("Plan", self.summary_lines())

    def _repr_html_(self) -> str:
        return html_summary("Plan", self.summary_lines())


@dataclass(frozen=True, slots=True, repr=False)
class FrontierPoint:
    """One plan of the trade-off between memory and time; ``overhead`` is a share of the plain step."""

    peak_bytes: int
    overhead: float
    plan: Plan

    def facts(self) -> dict[str, int | float]:
        """Return its numbers by name, as ``--json`` and pages have them."""
        return {
            "peak_bytes": self.peak_bytes,
            "overhead": self.overhead,
            "recompute_flops": self.plan.recompute_flops,
            "optimality_gap": self.plan.optimality_gap,
            "host_bytes": self.plan.host_bytes,
        }

    def __repr__(self) -> str:
        return f"FrontierPoint({format_bytes(self.peak_bytes)} peak, {format_overhead(self.overhead)} time)"
