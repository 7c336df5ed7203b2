"""FSDP2 in two processes: gathered parameters are counted while they exist, and replays find them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.models import WIDTH, Block, bare, sharded, trained
from tests.distributed.ranks_at_work import RanksAtWork
from torch import nn

import memfit


def fit_sharded(rank: int, share: float) -> dict[str, Any]:
    model, batch = bare(rank)
    plain_losses = trained(sharded(model), batch)
    model, batch = bare(rank)
    model = sharded(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    profile = memfit.profile(model, batch, optimizer=optimizer)
    fitted = memfit.fit(model, batch, budget=int(share * profile.peak_bytes), optimizer=optimizer)
    after = [parameter.to_local() for parameter in model.parameters()]
    return {
        "profile": profile.peak_bytes,
        "verification": fitted.verification,
        "is_as_before": all(map(torch.equal, before, after))
        and not optimizer.state
        and all(parameter.grad is None for parameter in model.parameters()),
        "losses_agree": trained(model, batch) == plain_losses,
    }


def test_a_sharded_model_is_fitted_and_gathered_parameters_count_while_they_exist(ranks: RanksAtWork) -> None:
    first, second = ranks.run(fit_sharded, 0.7)
    verification = first["verification"]
    assert verification == second["verification"]
    assert verification.within_budget
    assert verification.gradients_equal
    # Where a thread of gloo is the last to hold a collective's buffer, it may free it some ops later.
    buffer_bytes = 2 * 4 * sum(parameter.numel() for parameter in Block().parameters())
    assert abs(verification.plain_peak_bytes - first["profile"]) <= buffer_bytes
    assert abs(verification.peak_bytes - verification.predicted_peak_bytes) <= buffer_bytes
    for each in (first, second):
        assert each["is_as_before"]
        assert each["losses_agree"]


def apply_plan_for_the_bare_model(rank: int) -> list[bool]:
    """Drop all that can be dropped, also what leaves a sharded module: replays need parameters before their turn."""
    model, batch = bare(rank)
    everything = memfit.plan(memfit.profile(model, batch), force_recompute=["**::*"], budget="1GiB")
    model = sharded(model)
    found = []
    for is_planned in (False, True, True):
        model.zero_grad()
        applied = memfit.apply(model, everything) if is_planned else None
        model(batch).backward()
        if applied is not None:
            applied.remove()
        found.append([parameter.grad.to_local().clone() for parameter in model.parameters()])
    return [all(map(torch.equal, found[0], planned)) for planned in found[1:]]


def test_a_plan_for_the_bare_model_applies_to_the_sharded_one(ranks: RanksAtWork) -> None:
    assert ranks.run(apply_plan_for_the_bare_model) == [[True, True]] * 2


def profile_on_fake_tensors(rank: int) -> tuple[str, bool]:
    model, batch = bare(rank)
    plain_losses = trained(sharded(model), batch)
    model = sharded(bare(rank)[0])
    with pytest.raises(memfit.MemfitError) as caught:
        memfit.profile(model, batch, step=lambda batch: model(batch).backward(), mode="fake")
    return str(caught.value), trained(model, batch) == plain_losses


def test_a_sharded_model_is_not_profiled_on_fake_tensors_which_would_stay_in_it(ranks: RanksAtWork) -> None:
    for message, trains_as_before in ranks.run(profile_on_fake_tensors):
        assert "fully_shard keeps state of its own" in message
        assert trains_as_before


def save_and_resume(rank: int, folder: str) -> bool:
    """Train, save and resume with a plan applied, by torch.distributed.checkpoint; compare with training plainly."""
    from torch.distributed import checkpoint

    model, batch = bare(rank)
    plan = memfit.plan(memfit.profile(model, batch), strategy=memfit.Full())
    model = sharded(model)
    plain_losses = trained(model, batch) + trained(model, batch)
    model = sharded(bare(rank)[0])
    with memfit.apply(model, plan):
        losses = trained(model, batch)
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
    resumed = sharded(bare(rank)[0])
    with memfit.apply(resumed, plan):
        state = {"model": resumed.state_dict()}
        checkpoint.load(state, checkpoint_id=folder)
        resumed.load_state_dict(state["model"])
        losses += trained(resumed, batch)
    return losses == plain_losses


def test_distributed_checkpoints_are_saved_and_loaded_with_a_plan_applied(ranks: RanksAtWork, tmp_path: Path) -> None:
    assert ranks.run(save_and_resume, str(tmp_path)) == [True, True]


def profile_tensor_parallel(rank: int) -> int:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    with pytest.warns(UserWarning, match="opaque"):
        return memfit.profile(model, torch.randn(4, WIDTH), loss=torch.sum).peak_bytes


def test_profiles_warn_that_dtensors_are_opaque(ranks: RanksAtWork) -> None:
    first, second = ranks.run(profile_tensor_parallel)
    assert first == second > 0
