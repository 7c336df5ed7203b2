"""A model with a plan that is compiled or exported from outside: the graph is that of the plain model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit

# Compiling warns of torch's own affairs.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Model(nn.Module):
    """Blocks of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.fixture(params=["one size", "by size"])
def fitted(request: Any) -> memfit.Fitted:
    torch.manual_seed(0)
    torch.compiler.reset()
    model, x = Model(), torch.randn(64, 8)
    budget = memfit.profile(model, x).peak_bytes * 3 // 4
    if request.param == "one size":
        return memfit.fit(model, x, budget=budget)
    return memfit.fit(model, batches=[torch.randn(8, 8), x], budget=budget)


def gradients(model: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor) -> list[Tensor]:
    for parameter in parameters:
        parameter.grad = None
    model(x).backward()
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@pytest.mark.parametrize("strict", [False, True])
def test_a_fitted_model_is_exported_as_without_its_plan(fitted: memfit.Fitted, strict: bool) -> None:
    model, x = fitted.model, torch.randn(64, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        exported = torch.export.export(model, (x,), strict=strict)
    assert torch.equal(exported.module()(x), model(x))
    assert fitted.is_applied


def test_a_fitted_model_compiles_in_one_graph_and_says_that_the_plan_is_left_out(fitted: memfit.Fitted) -> None:
    model, x = fitted.model, torch.randn(64, 8)
    parameters = list(model.parameters())
    planned = gradients(model, parameters, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.warns(UserWarning, match="compiled from outside: it runs as without the plan") as caught:
        found = gradients(compiled, parameters, x)
    assert sum("compiled from outside" in str(each.message) for each in caught) == 1
    assert all(map(torch.equal, found, planned))
    fitted.remove()
    assert all(map(torch.equal, gradients(compiled, parameters, x), planned))


def test_compiling_for_inference_says_nothing(fitted: memfit.Fitted) -> None:
    model, x = fitted.model, torch.randn(64, 8)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))
