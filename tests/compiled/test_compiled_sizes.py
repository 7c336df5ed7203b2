"""Compiled blocks in batches of other sizes: gradients, budgets, and how often dynamo traces."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.compiled.compiled_models import WIDTH, PooledBlock, SmallBlocks
from tests.compiled.measured_models import compiled_profile, gradients
from tests.loop_peaks import peaks_of_steps
from torch import Tensor, nn

import memfit
from memfit.compiled.partition_menus import LEAST
from memfit.graph.compiled_data.compiled_blocks import EVERYTHING, Partition
from memfit.runtime.compiling.planned_blocks import PlannedBlocks
from memfit.sizes.compiled_sizes import CompiledFittedBySize


def rows(number: int) -> Tensor:
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(number))


def test_batches_of_all_sizes_keep_the_budget_and_compile_nothing_more() -> None:
    torch.manual_seed(0)
    model = SmallBlocks()
    budget = 900_000
    with warnings.catch_warnings():
        # Which partitions are the fastest, and by how much their peaks are overestimated, is another matter.
        warnings.filterwarnings("ignore", message="the measured peak")
        fitted = memfit.fit(model, batches=[rows(128), rows(512)], budget=budget, compile=True)
    assert isinstance(fitted, CompiledFittedBySize)
    small, large = (plan.compiled for plan in fitted.plans)
    assert small is not None
    assert large is not None
    assert "least" in large.choice.values()
    assert "2 plans with compiled blocks" in repr(fitted)
    sizes = [512, 128, 7, 300, 129, 511, 512]
    with torch.compiler.set_stance("fail_on_recompile"):
        found = [gradients(model, rows(size))[:-1] for size in sizes]
        peaks = [*peaks_of_steps(model, rows(512), lambda loss: loss)]
        peaks += [max(peaks_of_steps(model, rows(size), lambda loss: loss, num_steps=1)) for size in (128, 511)]
    assert max(peaks) <= budget
    with pytest.warns(UserWarning, match=r"got float32\[600, 32\]"):
        model(rows(600))
    fitted.remove()
    for size, of_size in zip(sizes, found, strict=True):
        for gradient, expected in zip(of_size, gradients(model, rows(size))[:-1], strict=True):
            torch.testing.assert_close(gradient, expected)
    assert "forward" not in vars(model)


def test_blocks_with_graphs_of_their_own_stay_below_the_recompile_limit() -> None:
    """dynamo takes an integer of a module for a constant: blocks with numbers have a graph each."""
    torch.manual_seed(0)
    model = SmallBlocks(4, are_numbered=True)
    batch = rows(64)
    with torch._dynamo.config.patch(recompile_limit=2):
        profile = compiled_profile(model, batch)
        assert profile.compiled is not None
        assert dict(profile.compiled.not_compiled) == {}
        assert sum(len(kind.blocks) for kind in profile.compiled.kinds) == 4
        plan = memfit.plan(profile, budget="1GiB")
        with torch.compiler.set_stance("fail_on_recompile"), memfit.apply(model, plan):
            model(batch).backward()


# What dynamo warns of itself when it traces another size.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_what_the_compiler_decides_by_a_size_is_guarded_by_it() -> None:
    """inductor pools by windows of the size that it was compiled for, and says so while the graph is compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(PooledBlock(), PooledBlock())
    with PlannedBlocks(model, {"0": LEAST, "1": Partition(EVERYTHING, 0.0, {})}):
        found = {size: model(rows(size)) for size in (48, 64, 66)}
    for size, output in found.items():
        torch.testing.assert_close(output, model(rows(size)))


def test_a_rate_that_differs_from_model_to_model_is_compiled() -> None:
    """dynamo makes a variable of a number that changes, and traces again where the compiler needs a constant."""
    for rate in (0.1, 0.2):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(rate))
        with PlannedBlocks(model, {"": LEAST}):
            # A block that stays in eager warns.
            model(rows(8))
