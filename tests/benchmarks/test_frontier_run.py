"""The frontier benchmark, run on a CPU with a tiny model: what it writes can be read, and is true to the byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import frontier
import pytest
import torch
from frontier_criteria import Verdict, criteria_of, verdict_beside
from frontier_results import ModelResult, load

ROOT = Path(__file__).parents[2]
OPTIONS = ["--small", "--rounds", "1", "--steps", "1", "--points", "5", "--offloading"]
RECOMPUTING = [
    "torch: checkpoint every block",
    "torch: checkpoint every 2nd block",
    "torch: checkpoint every 3rd block",
    "torch: checkpoint every 4th block",
    "torch: selective, save matmuls + attention",
    "torchtitan: selective, every 2nd matmul",
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frontier")
    subprocess.run(
        [sys.executable, "benchmarks/frontier.py", "gpt-2048", *OPTIONS, "--out", str(folder)],
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        timeout=120,
    )
    return folder / "gpt-2048.json"


@pytest.fixture
def model(written: Path) -> ModelResult:
    (model,) = load([written, written.with_name("gpt-2048-offloading.json")])
    return model


@pytest.fixture(params=["recomputing", "offloading"])
def group(model: ModelResult, request: pytest.FixtureRequest) -> ModelResult:
    """The plans that only recompute, and those that may offload, each with the peers that they are beside."""
    if request.param == "recomputing":
        return model
    assert model.offloading is not None
    return model.offloading


def test_all_ways_are_measured_and_each_peer_has_memfit_beside_it(group: ModelResult) -> None:
    assert [row.method for row in group.rows.values() if row.error is not None or not row.is_measured] == []
    in_time = {Verdict.FASTER, Verdict.AS_FAST, Verdict.SLOWER}
    assert {verdict_beside(group, peer) for peer in group.peers()} <= in_time
    assert all(group.is_planned_for_peak_of(peer.method) for peer in group.peers())


def test_offloading_is_beside_the_peer_that_does_the_same_and_in_the_same_run(model: ModelResult) -> None:
    assert model.offloading is not None
    assert [row.method for row in model.peers()] == RECOMPUTING
    assert [row.method for row in model.offloading.peers()] == [*RECOMPUTING, "torch: save_on_cpu"]
    assert model.offloading.plain == model.plain
    assert list(model.offloading.rows) != list(model.rows)


def test_of_two_groups_in_one_run_the_second_has_half_as_many_budgets_of_its_own(model: ModelResult) -> None:
    assert model.offloading is not None
    assert [len(group.plans) - len(group.peers()) for group in (model, model.offloading)] == [5, 3]


def test_peaks_on_a_cpu_are_predicted_to_the_byte_and_within_their_budgets(group: ModelResult) -> None:
    for plan in group.plans:
        assert plan.measured_peak_bytes == plan.predicted_peak_bytes
        assert plan.measured_peak_bytes <= plan.budget_bytes
    smallest = group.plans[-1]
    assert smallest.budget_bytes == smallest.measured_peak_bytes == group.smallest_budget_bytes


def test_gradients_are_the_plain_steps(model: ModelResult) -> None:
    assert model.gradient_noise == 0.0
    assert all(row.gradients_equal for row in model.rows.values())
    assert {each.name: each.is_met for each in criteria_of(model)}["gradients"] is True


def test_a_plan_that_saves_everything_is_measured_as_the_plain_step(model: ModelResult) -> None:
    largest = model.plans[len(RECOMPUTING)]
    row = model.rows[largest.label]
    assert (row.same_as, row.ratio, row.peak_bytes) == ("plain", 1.0, model.plain.peak_bytes)


def test_the_machine_and_versions_are_beside_the_numbers(written: Path) -> None:
    document = json.loads(written.read_text())
    assert "CPU, torch " in document["machine"]
    assert {"torch", "memfit"} <= set(document["versions"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run on")
def test_without_a_gpu_it_says_what_can_be_done() -> None:
    with pytest.raises(SystemExit, match="2"):
        frontier.main(["gpt-2048"])
