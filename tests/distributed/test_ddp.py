"""DDP in two processes: profiles, plans and verification, the same in both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.models import bare, in_ddp, trained
from tests.distributed.ranks_at_work import RanksAtWork
from torch import nn

import memfit


def fit_in_ddp(rank: int, share: float, num_rows: int, pause_seconds: float) -> dict[str, Any]:
    """Fit a DDP model that is new to ``share`` of its peak, on a rank that may be slow and have a larger batch."""
    model, batch = bare(rank, num_rows=num_rows * (1 + rank), pause_seconds=pause_seconds * rank)
    plain_losses = trained(in_ddp(model), batch)
    model, batch = bare(rank, num_rows=num_rows * (1 + rank), pause_seconds=pause_seconds * rank)
    model = in_ddp(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    profile = memfit.profile(model, batch, optimizer=optimizer)
    fitted = memfit.fit(model, batch, budget=int(share * profile.peak_bytes), optimizer=optimizer)
    return {
        "profile": profile.peak_bytes,
        "plan": {name: str(decision) for name, decision in fitted.plan.decisions.items()},
        "verification": fitted.verification,
        "losses_agree": trained(model, batch) == plain_losses,
    }


def test_ddp_is_fitted_alike_in_all_ranks_for_the_fullest_one_however_slow_one_is(ranks: RanksAtWork) -> None:
    first, second = ranks.run(fit_in_ddp, 0.75, 128, 0.02)
    assert first["plan"] == second["plan"]
    assert first["profile"] == second["profile"]
    assert first["verification"] == second["verification"]
    verification = first["verification"]
    assert verification.within_budget
    assert verification.gradients_equal
    # The bytes of the rank with the larger batch, to the byte: buckets are counted.
    assert verification.plain_peak_bytes == first["profile"]
    assert verification.peak_bytes == verification.predicted_peak_bytes
    assert first["losses_agree"]
    assert second["losses_agree"]


def train_after_profiling(rank: int) -> list[bool]:
    """Return, for each kind of DDP, whether training after a profile and with a plan is as without."""
    kinds: list[dict[str, Any]] = [
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 0.001},
    ]
    agree = []
    for kind in kinds:
        model, batch = bare(rank)
        plain_losses = trained(nn.parallel.DistributedDataParallel(model, **kind), batch)
        model = nn.parallel.DistributedDataParallel(bare(rank)[0], **kind)
        plan = memfit.plan(memfit.profile(model, batch), strategy=memfit.Full())
        agree.append(memfit.verify(model, plan, batch).holds)
        with memfit.apply(model, plan):
            agree.append(trained(model, batch) == plain_losses)
    return agree


def test_every_kind_of_ddp_trains_as_without_memfit(ranks: RanksAtWork) -> None:
    assert ranks.run(train_after_profiling) == [[True] * 8] * 2


def infeasible(rank: int) -> int:
    model, batch = bare(rank)
    with pytest.raises(memfit.InfeasibleBudgetError) as error:
        memfit.fit(in_ddp(model), batch, budget=1000)
    return error.value.minimum_bytes


def test_a_budget_that_is_too_small_is_refused_in_all_ranks(ranks: RanksAtWork) -> None:
    first, second = ranks.run(infeasible)
    assert first == second > 1000


def move_plans(rank: int) -> list[bool]:
    """Apply a plan for the bare model to DDP, and the reverse; return whether the gradients are the plain ones."""
    model, batch = bare(rank)
    for_bare = memfit.plan(memfit.profile(model, batch), strategy=memfit.Full())
    parallel = in_ddp(model)
    for_ddp = memfit.plan(memfit.profile(parallel, batch), strategy=memfit.Full())
    agree = [for_bare.recorded_modules == for_ddp.recorded_modules]
    for target, plan in ((parallel, for_bare), (model, for_ddp), (parallel, for_ddp)):
        found = []
        for is_planned in (False, True):
            parallel.zero_grad()
            applied = memfit.apply(target, plan) if is_planned else None
            parallel(batch).backward()
            if applied is not None:
                applied.remove()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
        agree.append(all(map(torch.equal, *found)))
    return agree


def test_plans_for_the_bare_model_apply_to_ddp_and_the_reverse(ranks: RanksAtWork) -> None:
    assert ranks.run(move_plans) == [[True] * 4] * 2


def fit_step_with_its_own_collective(rank: int) -> Any:
    """A bare model whose loss is averaged by hand: only the run of the step shows that ranks depend on each other."""
    model, batch = bare(rank, pause_seconds=0.02 * rank)

    def loss(output: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(output.detach().clone())
        return output

    profile = memfit.profile(model, batch, loss=loss)
    return memfit.fit(model, batch, loss=loss, budget=int(0.75 * profile.peak_bytes)).verification


def test_ranks_agree_where_only_the_step_has_collectives(ranks: RanksAtWork) -> None:
    first, second = ranks.run(fit_step_with_its_own_collective)
    assert first == second


def profile_without_the_other_ranks(rank: int) -> int:
    if rank:
        return 0
    model, batch = bare(rank)
    return memfit.profile(model, batch).peak_bytes


def test_one_rank_may_profile_a_model_of_its_own(ranks: RanksAtWork) -> None:
    assert ranks.run(profile_without_the_other_ranks)[0] > 0


def fit_by_size(rank: int) -> dict[str, Any]:
    """Fit for batches of two sizes, and train on batches of other sizes in each rank."""
    model, batch = bare(rank, num_rows=64)
    plain, _ = bare(rank, num_rows=64)
    rows = [[64, 10], [10, 64], [40, 24]]
    plain_losses = [trained(plain_ddp, batch[: each[rank]]) for plain_ddp in [in_ddp(plain)] for each in rows]
    model = in_ddp(model)
    with pytest.raises(memfit.InvalidParameterError, match="all processes of the job must give batches= of the same"):
        memfit.fit(model, batches=[batch[: 8 + rank], batch], budget="1GiB")
    budget = int(0.9 * memfit.profile(model, batch).peak_bytes)
    fitted = memfit.fit(model, batches=[batch[:8], batch], budget=budget)
    losses = [trained(model, batch[: each[rank]]) for each in rows]
    sizes = {entry.sizes for entry in fitted.plans.entries}
    return {"sizes": sizes, "largest": fitted.plans.largest.sizes, "losses_agree": losses == plain_losses}


def test_ranks_may_train_on_batches_of_other_sizes_and_give_the_same_to_fit(ranks: RanksAtWork) -> None:
    first, second = ranks.run(fit_by_size)
    assert first["sizes"] == second["sizes"]
    assert first["largest"] == second["largest"] == (64,)
    assert (64,) in first["sizes"]
    assert first["losses_agree"]
    assert second["losses_agree"]
