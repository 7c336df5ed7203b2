"""What frontier.py wrote, read back: the rows and plans of each model, from one or several files. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import Row

GIB = 2**30
PLAIN, PLAIN_AGAIN = "plain", "plain again"
FULL_CHECKPOINTING = "torch: checkpoint every block"
OFFLOADING = "torch: save_on_cpu"
# Peaks that differ by no more than this share of the whole are the same.
SAME_PEAK = 0.001

# What a step may take at so many GiB of activations, relative to the plain one: a little above the floor that the times
# of single ops on an H200 set to recomputing.
REQUIRED_RATIOS: Mapping[str, Mapping[float, float]] = {
    "gpt-2048": {21.0: 1.03, 14.3: 1.11, 9.0: 1.17, 7.5: 1.195},
    "llama-2048": {18.6: 1.05, 10.1: 1.145, 8.1: 1.175},
    "llama-4096": {7.9: 1.04, 4.3: 1.155},
}

# The same with compiled blocks, by the group of plans.
REQUIRED_COMPILED_RATIOS: Mapping[str, Mapping[str, Mapping[float, float]]] = {
    "llama-2048": {
        "chunked loss": {12.3: 0.70, 9.3: 0.74, 6.2: 0.79, 3.5: 0.83},
        "chunked loss, the host's memory": {9.3: 0.70, 6.2: 0.75, 3.5: 0.80},
    },
    "llama-4096": {
        "chunked loss": {5.2: 0.835, 4.1: 0.87, 3.0: 0.93},
        "chunked loss, the host's memory": {3.0: 0.85},
    },
}


def label_at(activations_gib: float) -> str:
    """Return what memfit's plan for so many GiB of activations is called."""
    return f"memfit at {activations_gib} GiB of activations"


@dataclass(frozen=True)
class PlanResult:
    """What a plan was for, what it foresaw, and what was measured (None where it failed)."""

    label: str
    budget_bytes: int | None
    predicted_peak_bytes: int
    predicted_overhead: float
    optimality_gap: float
    measured_peak_bytes: int | None
    measured_overhead: float | None
    host_bytes: int = 0

    @property
    def overhead_bound(self) -> float:
        """What any plan of that budget must recompute, at the profiled costs of ops: a proven lower bound.

        Compiled steps may be faster than the plain one.
        """
        return max(min(0.0, self.predicted_overhead), self.predicted_overhead - self.optimality_gap)


@dataclass(frozen=True)
class ModelResult:
    """All that is known of one model.

    ``compiled``, ``captured``, ``strategies`` and ``offloading`` are groups of their own, each with a plain step of its
    own. In ``strategies`` the peers are memfit's layer strategies, in ``offloading`` plans may use the host's memory.
    ``compiled`` is torch.compile per block; ``compiled_plans`` are memfit's plans for compiled blocks, by group, all
    relative to one plain step.
    """

    name: str
    machine: str
    versions: Mapping[str, str]
    note: str | None
    rows: Mapping[str, Row]
    plans: tuple[PlanResult, ...]
    infeasible: Mapping[str, str]
    compiled: Mapping[str, Row]
    captured: ModelResult | None
    strategies: ModelResult | None
    offloading: ModelResult | None
    compiled_plans: Mapping[str, ModelResult]
    facts: Mapping[str, Any]

    @property
    def machine_and_frameworks(self) -> str:
        """The machine, and the versions that its own line does not name."""
        frameworks = ("transformers", "timm", "torchvision")
        named = [f"{name} {self.versions[name]}" for name in frameworks if name in self.versions]
        return ", ".join([self.machine, *named])

    @property
    def measured_at(self) -> str | None:
        """The minute (UTC) of the run; the first runs did not note it."""
        measured_at: str | None = self.facts.get("measured_at")
        return measured_at

    @property
    def plain(self) -> Row:
        """The step that saves everything."""
        return self.rows[PLAIN]

    @property
    def time_noise(self) -> float:
        """How far two runs of the plain step are apart, as a share of it."""
        again = self.rows[PLAIN_AGAIN].ratio
        return 0.0 if again is None else abs(again - 1)

    @property
    def gradient_noise(self) -> float:
        """How far the gradients of two plain steps are apart."""
        return max(self.facts.get("gradient_noise", 0.0), self.rows[PLAIN_AGAIN].gradient_error or 0.0)

    @property
    def kernel_noise(self) -> float:
        """How far they were apart before all were compared with kernels that sum in a fixed order; 0 where not."""
        return float(self.facts.get("kernel_noise", 0.0))

    @property
    def smallest_budget_bytes(self) -> int:
        """The smallest budget that memfit could plan for."""
        found: int | None = self.facts.get("smallest_budget_bytes")
        return found if found is not None else min(plan.predicted_peak_bytes for plan in self.plans)

    def peers(self) -> list[Row]:
        """Return the eager methods that memfit is measured against."""
        return [
            row for method, row in self.rows.items() if method not in (PLAIN, PLAIN_AGAIN) and not _is_memfit(method)
        ]

    def memfit_at_peak_of(self, peer: str) -> Row | None:
        """Return memfit's row at the peak of ``peer``; None where there is none.

        Where that peak was no budget that could be promised, the fastest plan counts that turned out to stay within it:
        budgets have a margin for what allocators do. Within a thousandth of it, that is: save_on_cpu keeps even the few
        numbers beside a result on the host, and is smaller by those.
        """
        planned = self.rows.get(_label_at_peak_of(peer))
        peak_bytes = self.rows[peer].activation_peak_bytes if peer in self.rows else None
        if planned is not None or peak_bytes is None:
            return planned
        most_bytes = peak_bytes + self.rows[peer].peak_bytes * SAME_PEAK
        within = [row for row in self.memfit_rows() if row.activation_peak_bytes <= most_bytes]
        return min(within, key=lambda row: row.ratio, default=None)

    def is_planned_for_peak_of(self, peer: str) -> bool:
        """Return whether memfit was given the peak of ``peer`` as a budget, and had a plan for it."""
        return _label_at_peak_of(peer) in self.rows

    def memfit_rows(self, *, own_only: bool = False) -> list[Row]:
        """Return memfit's measured rows from the largest to the smallest, each measurement once.

        With ``own_only``, those of its own budgets, whether or not a peer's budget gave the same plan.
        """
        rows = [
            row
            for method, row in self.rows.items()
            if _is_memfit(method) and row.is_measured and not (own_only and _at_peak(method))
        ]
        distinct = {(row.same_as or row.method): row for row in rows if own_only or row.same_as is None}
        return sorted(distinct.values(), key=lambda row: -row.activation_peak_bytes)


def load(paths: Iterable[Path]) -> list[ModelResult]:
    """Return the models in ``paths`` by name; what several files say of one (eager, compiled) is put together."""
    documents: dict[str, dict[str, Any]] = {}
    for path in paths:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        for name, model in document["models"].items():
            known = documents.setdefault(name, {})
            known.update(model)
            if "rows" in model:
                known.update({key: document.get(key) for key in ("machine", "versions", "note", "measured_at")})
    return [_model(name, data) for name, data in sorted(documents.items()) if "rows" in data]


def load_with_host_memory(path: Path) -> list[ModelResult]:
    """Return what ``path`` says of plans that may use the host's memory, each as a model of its own."""
    models = json.loads(Path(path).read_text(encoding="utf-8"))["models"]
    return [_model(name, data["offloading"]) for name, data in sorted(models.items()) if "offloading" in data]


def _model(name: str, data: Mapping[str, Any]) -> ModelResult:
    return ModelResult(
        name=name,
        machine=data["machine"],
        versions=data["versions"] or {},
        note=data.get("note"),
        rows=_rows(data["rows"]),
        plans=tuple(
            PlanResult(label, **{key: plan[key] for key in PlanResult.__dataclass_fields__ if key in plan})
            for label, plan in data["plans"].items()
        ),
        infeasible=data.get("infeasible", {}),
        compiled=_rows(data.get("compiled", {}).get("rows", [])),
        captured=_model(name, data["captured"]) if "captured" in data else None,
        strategies=_model(name, data["strategies"]) if "strategies" in data else None,
        offloading=_model(name, data["offloading"]) if "offloading" in data else None,
        compiled_plans=_compiled_plans(name, data.get("compiled-plans", {})),
        facts=data,
    )


def _compiled_plans(name: str, data: Mapping[str, Any]) -> dict[str, ModelResult]:
    about = {key: data.get(key) for key in ("machine", "versions", "note", "measured_at", "seconds")}
    return {group: _model(name, about | results) for group, results in data.get("groups", {}).items()}


def _rows(data: Iterable[Mapping[str, Any]]) -> dict[str, Row]:
    return {row["method"]: Row.from_data(row) for row in data}


def _label_at_peak_of(peer: str) -> str:
    return f"memfit at the peak of ({peer})"


def _is_memfit(method: str) -> bool:
    return method.startswith("memfit ")


def _at_peak(method: str) -> bool:
    return method.startswith("memfit at the peak of ")
