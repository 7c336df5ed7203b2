"""On a CPU the engine's own work makes the step longer, and predictions count it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from memfit.calibration.host_costs import TYPICAL_ON_CPU
from memfit.planning.simulate.simulator import judged
from memfit.planning.step import Step
from memfit.runtime.engine.native_tape import engine_name


@pytest.fixture(scope="module")
def profile() -> memfit.ModelProfile:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))
    return memfit.profile(model, torch.randn(16, 8), loss=lambda output: output.square().mean())


def test_a_plan_adds_what_the_engine_costs_beside_its_replays(profile: memfit.ModelProfile) -> None:
    step = Step(profile)
    dropped = step.recomputed_of(set(step.plannable))
    judgement = judged(step, dropped)
    costs = step.recording.cost_of(dropped, len(dropped))
    assert min(costs) > 0
    assert judgement.added_seconds == pytest.approx(judgement.recompute_seconds + sum(costs))
    assert judged(step, frozenset()).added_seconds == 0
    unknown = Step(replace(profile, host=None))
    assert judged(unknown, dropped).added_seconds == judged(unknown, dropped).recompute_seconds


def test_costs_are_kept_in_files(profile: memfit.ModelProfile, tmp_path: Path) -> None:
    assert profile.host == TYPICAL_ON_CPU[engine_name()]
    profile.save(tmp_path / "profile.json")
    assert memfit.ModelProfile.load(tmp_path / "profile.json").host == profile.host
