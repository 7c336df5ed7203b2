"""``repr()`` of the public objects: short texts; notebooks get a table."""

from __future__ import annotations

import torch
from torch import nn

import memfit


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])


def test_every_object_prints_as_at_most_six_lines() -> None:
    batch = torch.ones(64, 32)
    loss = torch.sum
    profile = memfit.profile(model(), batch, loss=loss)
    plan = memfit.plan(profile, strategy=memfit.Full())
    point = memfit.frontier(profile, points=2)[-1]
    verification = memfit.verify(model(), plan, batch, loss=loss)
    fitted = memfit.fit(model(), batch, budget=point.peak_bytes, loss=loss)
    with memfit.apply(model(), plan) as applied:
        texts = {repr(each) for each in (profile, plan, point, verification, fitted, applied)}
    for text in texts:
        assert len(text.splitlines()) <= 6, text
        assert len(text) < 400
    assert str(plan) == repr(plan)
    assert repr(plan).splitlines()[0] == "Plan"
    assert any(text.startswith("Fitted: Sequential\nVerification\n  gradients  equal\n") for text in texts)
    assert repr(applied).startswith("Applied: removed from Sequential\nPlan\n")
    assert repr(point).startswith("FrontierPoint(")
    assert repr(point).endswith("% time)")
    for shown in (plan._repr_html_(), profile._repr_html_(), fitted._repr_html_()):
        assert shown.startswith("<table>")
