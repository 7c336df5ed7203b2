"""Plans inside CUDA graphs: a captured step replays what the plan drops, with the gradients of the plain step."""

from __future__ import annotations

import pytest
import torch
from tests.engine.plans import applied
from torch import Tensor, nn

import memfit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def network(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Dropout(dropout), nn.Linear(256, 64))
        for _ in range(4)
    )
    return nn.Sequential(*blocks).cuda()


def batch() -> Tensor:
    return torch.randn(512, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def captured_step(model: nn.Module, x: Tensor) -> tuple[torch.cuda.CUDAGraph, int]:
    """Return the graph of a step, and the most memory that was allocated while it was captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        model(x).square().sum().backward()
    return graph, torch.cuda.max_memory_allocated() - before


def gradients_of(graph: torch.cuda.CUDAGraph, model: nn.Module) -> list[Tensor]:
    torch.manual_seed(7)
    graph.replay()
    torch.cuda.synchronize()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_captured_step_has_the_gradients_of_the_plain_one(dropout: float) -> None:
    model, x = network(dropout), batch()
    plan = memfit.plan(memfit.profile(model, x), strategy=memfit.NoCheckpointing(), force_recompute=["*"])
    plain_graph, plain_bytes = captured_step(model, x)
    expected = [gradients_of(plain_graph, model) for _ in range(2)]
    model.zero_grad()
    with applied(model, plan):
        graph, planned_bytes = captured_step(model, x)
    actual = [gradients_of(graph, model) for _ in range(2)]
    assert len(expected[0]) == len(list(model.parameters()))
    for ours, theirs in zip(actual, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert planned_bytes < plain_bytes
