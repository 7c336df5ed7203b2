"""Plans that offload, from the profile to the proof. On a CPU the link is made up, but the copies are real."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import memfit
from memfit.graph.model_profile import Link

# A link that carries anything in no time: whatever can be offloaded is then better offloaded than recomputed.
QUICK = Link(1e15, 1e15, 0.0, host_free_bytes=2**40)
ACTIVATION_BYTES = 2**21


def chain() -> tuple[nn.Module, torch.Tensor]:
    """Return layers whose activations are large enough to be offloaded, and a batch."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*blocks), torch.randn(ACTIVATION_BYTES // (4 * 64), 64)


def num_offloaded(plan: memfit.Plan) -> int:
    return sum(decision is memfit.Decision.OFFLOAD for decision in plan.decisions.values())


def test_peaks_are_as_predicted_and_gradients_the_same_all_along_the_frontier() -> None:
    model, batch = chain()
    profile = replace(memfit.profile(model, batch), link=QUICK)
    points = memfit.frontier(profile, points=8, host_budget="auto")
    assert max(num_offloaded(point.plan) for point in points) > 5
    for point in points:
        verification = memfit.verify(model, point.plan, batch)
        assert verification.gradients_equal
        assert verification.peak_bytes == point.plan.predicted_peak_bytes
        assert verification.host_bytes == ACTIVATION_BYTES * num_offloaded(point.plan)


def test_fit_offloads_as_far_as_the_host_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.capture.real_step.measured_link", lambda device: QUICK)
    model, batch = chain()
    recomputing = memfit.frontier(memfit.profile(model, batch))[-1]
    with memfit.fit(model, batch, budget=recomputing.peak_bytes, host_budget=3 * ACTIVATION_BYTES) as fitted:
        assert 0 < num_offloaded(fitted.plan) <= 3
        assert fitted.plan.predicted_overhead < recomputing.overhead
        assert fitted.verification.gradients_equal
        assert fitted.verification.within_budget
        assert 0 < fitted.verification.host_bytes <= 3 * ACTIVATION_BYTES
