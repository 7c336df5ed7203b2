"""What lies outside compiled blocks: the eager engine recomputes it in the same plan and the same peak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.compiled.measured_models import Case, gradients, measured, same
from tests.loop_peaks import peaks_of_steps

import memfit
from memfit.graph.names import parse_value_name
from memfit.report.compiled_document import CompiledStep


@pytest.fixture(scope="module")
def case() -> Case:
    return measured("wide ends")


def modules_recomputed(plan: memfit.Plan) -> set[str]:
    return {parse_value_name(name).module for name in plan.recomputed_names}


def test_plans_go_below_what_blocks_alone_can_reach_and_keep_the_budget(case: Case, tmp_path: Path) -> None:
    assert case.profile.compiled is not None
    blocks_alone = replace(case.profile, compiled=replace(case.profile.compiled, outside=()))
    alone_bytes = memfit.frontier(blocks_alone, points=2)[-1].peak_bytes
    least_bytes = memfit.frontier(case.profile, points=2)[-1].peak_bytes
    # The wide activations of the stem need not live until its backward pass: 16 times the width, in float32.
    assert alone_bytes - least_bytes >= case.batch.nbytes * 16
    plan = memfit.plan(case.profile, budget=least_bytes)
    plan.save(tmp_path / "plan.json")
    loaded = memfit.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert modules_recomputed(plan) <= {"stem", "stem.up", "stem.norm", "tail.0", "tail.1"}
    assert not any(path.startswith("blocks") or not path for path in plan.recorded_modules + plan.hooked_modules)
    with memfit.apply(case.model, plan):
        recomputed = gradients(case.model, case.batch)
    with memfit.apply(case.model, loaded):
        peaks = peaks_of_steps(case.model, case.batch, lambda loss: loss)
    assert max(peaks) == least_bytes
    with memfit.apply(case.model, memfit.plan(case.profile, budget="1GiB")):
        assert same(recomputed, gradients(case.model, case.batch))


def test_where_blocks_alone_keep_the_budget_nothing_is_recomputed_outside(case: Case) -> None:
    plan = case.plan(1.0)
    assert not modules_recomputed(plan)
    assert not plan.recorded_modules


def test_the_frontier_has_both_and_verification_compares_with_all_saved(case: Case) -> None:
    points = memfit.frontier(case.profile, points=6)
    assert any(modules_recomputed(point.plan) for point in points)
    assert [point.overhead for point in points] == sorted(point.overhead for point in points)
    assert case.profile.compiled is not None
    for point in points:
        # The page shows the segments as they are with what the plan recomputes outside blocks.
        entry = CompiledStep(case.profile.compiled).point_entry(point, 0)
        assert max(entry["timeline_bytes"]) == point.peak_bytes
    plan = points[-1].plan
    verification = memfit.verify(case.model, plan, case.batch)
    assert verification.gradients_equal
    assert verification.peak_bytes == plan.predicted_peak_bytes
    assert verification.compared_with == "compiled step that saves everything"
