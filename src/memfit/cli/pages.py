"""Gathers what the report page shows, for the commands that write one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.environment import environment_facts
from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import FrontierPoint, Plan
from memfit.graph.verification import MethodResult, Verification
from memfit.report.page import write_page
from memfit.report.page_data import Mark, ReportData, SizeCurve, SizeRow
from memfit.report.strategy_marks import strategy_marks
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.fitted import Fitted
    from memfit.tuning.tuned import Tuned

# With fewer, the drawn line cuts corners at its small end.
NUM_POINTS = 32


def report_data(
    profile: ModelProfile,
    points: Sequence[FrontierPoint],
    *,
    title: str,
    plan: Plan | None = None,
    verifications: Sequence[Verification] = (),
    other_marks: Sequence[Mark] = (),
    sizes: SizeCurve | None = None,
) -> ReportData:
    """Return what a page shows of ``profile``, its frontier, and where there is one the plan in use."""
    measured = [mark for verification in verifications if (mark := _mark_of(verification)) is not None]
    chosen = None if plan is None else FrontierPoint(plan.predicted_peak_bytes, plan.predicted_overhead, plan)
    return ReportData(
        profile=profile,
        points=points,
        chosen=chosen,
        budget_bytes=None if plan is None else plan.budget_bytes,
        marks=(*strategy_marks(profile), *measured, *other_marks),
        title=title,
        facts=environment_facts(),
        sizes=sizes,
    )


def write_fitted_page(
    path: Path,
    title: str,
    fitted: Fitted,
    *,
    host_budget: int | str = 0,
    comparison: Sequence[MethodResult] = (),
    sizes: SizeCurve | None = None,
) -> None:
    """Write the page of a fitted model to ``path``: its frontier, its plan, and what was measured."""
    from memfit.cli.stages import frontier_of

    data = report_data(
        fitted.profile,
        frontier_of(fitted.profile, NUM_POINTS, host_budget),
        title=title,
        plan=fitted.plan,
        verifications=(fitted.verification,),
        other_marks=marks_of_methods(comparison),
        sizes=sizes_of_fitted(fitted) if sizes is None else sizes,
    )
    write_page(path, data)


def sizes_of_fitted(fitted: Fitted) -> SizeCurve | None:
    """Return the plans by size of a model that was fitted with batches of which one size varies, None for any other."""
    from memfit.fitted import FittedBySize

    if not isinstance(fitted, FittedBySize) or len(fitted.plans.largest.sizes) > 1:
        return None
    rows = [
        SizeRow(entry.sizes[0], entry.plan.predicted_peak_bytes, entry.plan.predicted_overhead)
        for entry in sorted(fitted.plans.entries, key=lambda entry: entry.sizes)
    ]
    return SizeCurve(rows, fitted.plans.largest.sizes[0], fitted.plan.budget_bytes, is_throughput=False)


def sizes_of_tuned(tuned: Tuned) -> SizeCurve:
    """Return every size that was tried."""
    rows = [
        SizeRow(row.size, row.peak_bytes, None if row.plan is None else row.throughput, row.is_measured)
        for row in sorted(tuned.table, key=lambda row: row.size)
    ]
    return SizeCurve(rows, tuned.size, tuned.fitted.plan.budget_bytes, is_throughput=True)


def marks_of_methods(comparison: Sequence[MethodResult]) -> tuple[Mark, ...]:
    """Return a mark for each method that was measured beside the plan, which has a mark of its own."""
    from memfit.verification.comparing import PLANNED

    return tuple(
        Mark(
            result.label,
            result.peak_bytes,
            result.overhead,
            is_measured=True,
            note="gradients equal" if result.gradients_equal else "gradients differ",
            overhead_quartiles=result.overhead_quartiles,
        )
        for result in comparison
        if result.label != PLANNED and result.peak_bytes is not None and result.overhead is not None
    )


def _mark_of(verification: Verification) -> Mark | None:
    if verification.overhead is None:
        return None
    budget = "" if verification.budget_bytes is None else f" at {format_bytes(verification.budget_bytes)}"
    note = "gradients equal" if verification.gradients_equal else "gradients differ in their last bits"
    if verification.gradient_tolerance is not None:
        note = f"gradients {verification.summary_lines()['gradients']}"
    return Mark(
        f"measured{budget}",
        verification.peak_bytes,
        verification.overhead,
        is_measured=True,
        note=note,
        overhead_quartiles=verification.overhead_quartiles,
    )
