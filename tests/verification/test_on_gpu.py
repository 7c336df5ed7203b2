"""``verify`` and ``fit`` on a CUDA device: the allocator's word on the peak, and a step that fits only by a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import memfit
from memfit.models import gpt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = {"layers": 6, "width": 512, "heads": 4, "batch": 16, "length": 512}


@contextmanager
def only(num_bytes: int) -> Iterator[None]:
    """Leave this process so much of the device's memory inside the block."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_measured_peak_is_within_the_budget_and_close_to_the_prediction() -> None:
    with torch.device("cuda"):
        model, batch = gpt(**SIZES)
    profile = memfit.profile(model, batch)
    smallest_bytes = memfit.frontier(profile)[-1].peak_bytes
    budget_bytes = (profile.peak_bytes + smallest_bytes) // 2
    with memfit.fit(model, batch, budget=budget_bytes) as fitted:
        assert fitted.verification.gradients_hold
        assert fitted.verification.peak_bytes <= budget_bytes
        # Kernels take workspaces that differ from call to call.
        assert abs(fitted.verification.peak_miss) < 0.05


def test_fit_offloads_where_the_host_has_room() -> None:
    with torch.device("cuda"):
        model, batch = gpt(**SIZES)
    profile = memfit.profile(model, batch)
    recomputing, offloading = (memfit.frontier(profile, host_budget=budget)[-1] for budget in (0, "auto"))
    assert offloading.peak_bytes < recomputing.peak_bytes
    # A profile of its own may tell it a little otherwise what the allocator takes.
    budget_bytes = (offloading.peak_bytes + recomputing.peak_bytes) // 2
    with memfit.fit(model, batch, budget=budget_bytes, host_budget="auto") as fitted:
        assert fitted.verification.gradients_hold
        assert fitted.verification.within_budget
        assert fitted.plan.host_bytes > 0
        model(batch).backward()


# What does not fit is profiled with fake tensors, which know nothing of kernels' workspaces; `fit` says so if it shows.
@pytest.mark.filterwarnings("default:the measured peak")
def test_a_model_trains_where_its_plain_step_runs_out_of_memory() -> None:
    with torch.device("cuda"):
        model, batch = gpt(**SIZES)
    profile = memfit.profile(model, batch)
    smallest_bytes = memfit.frontier(profile)[-1].peak_bytes
    budget_bytes = (profile.peak_bytes + smallest_bytes) // 2
    # Between the budget and the plain peak: blocks of the allocator need room beyond what is in use.
    with only((profile.peak_bytes + budget_bytes) // 2):
        with pytest.raises(memfit.MemfitError, match="the plain step does not fit the device"):
            memfit.profile(model, batch)
        with memfit.fit(model, batch, budget=budget_bytes) as fitted:
            assert fitted.verification.plain_peak_bytes is None
            assert fitted.verification.within_budget
            model(batch).backward()
