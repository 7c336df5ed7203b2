"""Pipeline stages in two processes: micro-batches in flight count, and stages that differ have plans of their own."""

from __future__ import annotations

from typing import Any

import torch
from tests.distributed.models import WIDTH, Block
from tests.distributed.ranks_at_work import RanksAtWork
from torch import Tensor, nn

import memfit
from memfit.runtime.allocation_meter import allocated_peak

CPU = torch.device("cpu")


def trained_stage(rank: int, share: float | None) -> dict[str, Any]:
    """Train a stage for two steps of four micro-batches, plainly or within a share of its peak."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(rank)
    # The first stage has fewer blocks, and more micro-batches in flight.
    model = nn.Sequential(*(Block() for _ in range(2 + rank)))
    schedule = Schedule1F1B(
        PipelineStage(model, rank, 2, CPU),
        n_microbatches=4,
        loss_fn=lambda output, target: (output - target).square().mean(),
    )
    torch.manual_seed(2)
    batch = torch.randn(256, WIDTH), torch.randn(256, WIDTH)
    losses: list[Tensor] = []

    def step(batch: tuple[Tensor, Tensor]) -> None:
        if rank == 0:
            schedule.step(batch[0])
        else:
            schedule.step(target=batch[1], losses=losses)

    found: dict[str, Any] = {}
    if share is not None:
        profile = memfit.profile(model, batch, step=step)
        budget_bytes = int(share * profile.peak_bytes)
        fitted = memfit.fit(model, batch, step=step, budget=budget_bytes)
        found |= {"profile": profile.peak_bytes, "budget": budget_bytes, "holds": fitted.verification.holds}
        found["modules"] = len(fitted.profile.layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    peaks, numbers = [], []
    for _ in range(2):
        optimizer.zero_grad()
        peaks.append(allocated_peak(lambda: step(batch), CPU, [*model.parameters(), *batch]))
        numbers += [loss.item() for loss in losses]
        losses.clear()
        optimizer.step()
    weights = [parameter.detach() for parameter in model.parameters()]
    return {**found, "peaks": peaks, "losses": numbers, "weights": weights}


def fit_stage(rank: int) -> dict[str, Any]:
    plain, planned = trained_stage(rank, None), trained_stage(rank, 0.9)
    return {
        **planned,
        "plain": plain["peaks"],
        "agrees": planned["losses"] == plain["losses"]
        and all(map(torch.equal, planned.pop("weights"), plain.pop("weights"))),
    }


def test_stages_that_differ_are_planned_each_by_itself_with_the_micro_batches_in_flight(ranks: RanksAtWork) -> None:
    for rank, found in enumerate(ranks.run(fit_stage)):
        assert found["agrees"]
        assert found["holds"]
        assert found["modules"] == 2 + rank
        assert found["profile"] == max(found["plain"])
        assert max(found["peaks"]) <= found["budget"] < max(found["plain"])
