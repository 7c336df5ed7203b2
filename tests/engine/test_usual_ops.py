"""Ops that the engine in C++ hears by kernels of their own: their calls are counted, and their writes are seen to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memfit.runtime.engine.forward_pass import UnplannedCalls
from memfit.runtime.engine.native_tape import new_tape
from memfit.runtime.engine.planned_modules import Fate, PlannedModule


def loss_by_tape(planned: PlannedModule, forward: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """Return the loss, and whether the calls were as many as the planned module expects."""
    tape = new_tape()
    reports: list[UnplannedCalls | None] = []
    tape.report = reports.append
    loss = tape.run(planned, forward, (), {})
    tape.close()
    return loss, reports == [None]


def test_calls_that_drop_nothing_are_counted_and_the_others_dropped() -> None:
    """Of five products the second and the fourth; the views between are no calls of anything."""
    weight = torch.full((8,), 1.25, requires_grad=True)
    fates = (Fate.SAVE, Fate.DROP, Fate.SAVE, Fate.DROP, Fate.SAVE)
    planned = PlannedModule("", nn.Identity(), {"aten.mul": fates}, num_calls={"aten.mul": 5})
    is_freed: list[bool] = []

    def forward() -> Tensor:
        x = weight + 0.5
        references = []
        for _ in fates:
            x = (x.view(2, 4).t() * weight.view(2, 4).t()).t().reshape(8)
            references.append(torch.UntypedStorage._weak_ref(x.untyped_storage()))
        is_freed.extend(torch.UntypedStorage._expired(reference) for reference in references)
        return x.sum()

    forward().backward()
    assert not any(is_freed)
    expected, weight.grad = weight.grad, None
    is_freed.clear()
    loss, is_as_planned = loss_by_tape(planned, forward)
    assert is_as_planned
    loss.backward()
    assert torch.equal(weight.grad, expected)
    assert is_freed == [fate is Fate.DROP for fate in fates]


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda t: t.add_(torch.ones(8)), id="add_"),
        pytest.param(lambda t: t.mul_(torch.full((8,), 3.0)), id="mul_"),
        pytest.param(lambda t: t.div_(torch.full((8,), 3.0)), id="div_"),
        pytest.param(lambda t: t.relu_(), id="relu_"),
        pytest.param(lambda t: t.clamp_(max=0.25), id="clamp_"),
        pytest.param(lambda t: t.index_put_((torch.tensor([1, 5]),), torch.tensor(9.0)), id="index_put_"),
        pytest.param(lambda t: t.masked_fill_(torch.arange(8) > 3, 7.0), id="masked_fill_"),
        pytest.param(lambda t: t.view(2, 4).t().add_(torch.ones(4, 2)), id="add_ to a view"),
    ],
)
def test_what_a_recipe_reads_is_copied_before_it_is_written(write: Callable[[Tensor], Tensor]) -> None:
    weight = torch.linspace(-1.0, 1.0, 8, requires_grad=True)
    planned = PlannedModule("", nn.Identity(), {"aten.exp": True})

    def forward() -> Tensor:
        read = weight * 1.5
        dropped = read.exp()
        product = dropped * dropped
        write(read)
        return (product + read).sum()

    forward().backward()
    expected, weight.grad = weight.grad, None
    loss, _ = loss_by_tape(planned, forward)
    loss.backward()
    assert torch.equal(weight.grad, expected)
