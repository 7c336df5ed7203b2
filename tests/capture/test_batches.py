"""Batches come in containers and objects of many classes: their tensors are found, put back, compared and made fake."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.capture.tensor_peaks import described_ops, peak_of_tensors
from tests.engine.step_comparison import assert_same
from torch import Tensor, nn
from torch.utils import _pytree
from transformers import BatchEncoding

import memfit
from memfit.capture.state.kept_state import KeptState
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.runtime.applying.batch_tensors import named_tensors
from memfit.verification.gradients import gradients_of


@dataclass
class Sample:
    """A batch as a dataclass."""

    x: Tensor
    scale: Tensor


@dataclass(slots=True)
class SlottedSample:
    """A batch as a dataclass without a dict."""

    x: Tensor
    scale: Tensor


class OwnBatch:
    """A batch as an object with attributes."""

    def __init__(self, x: Tensor, scale: Tensor) -> None:
        self.x = x
        self.scale = scale


class Registered:
    """A batch that hides its tensors from all but torch's pytrees."""

    __slots__ = ("hidden",)

    def __init__(self, x: Tensor, scale: Tensor) -> None:
        self.hidden = lambda: (x, scale)

    @property
    def x(self) -> Tensor:
        return self.hidden()[0]

    @property
    def scale(self) -> Tensor:
        return self.hidden()[1]


_pytree.register_pytree_node(
    Registered, lambda batch: (list(batch.hidden()), None), lambda children, _: Registered(*children)
)
Pair = namedtuple("Pair", "x scale")
BATCHES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda x, scale: (x, scale),
    "list": lambda x, scale: [x, scale],
    "named tuple": Pair,
    "dict": lambda x, scale: {"x": x, "scale": scale},
    "ordered dict": lambda x, scale: OrderedDict(x=x, scale=scale),
    "user dict": lambda x, scale: UserDict(x=x, scale=scale),
    "batch encoding": lambda x, scale: BatchEncoding({"x": x, "scale": scale}),
    "dataclass": Sample,
    "dataclass with slots": SlottedSample,
    "object": OwnBatch,
    "namespace": lambda x, scale: SimpleNamespace(x=x, scale=scale),
    "list in a tuple": lambda x, scale: ([x, scale],),
    "object in a dict": lambda x, scale: {"x": SimpleNamespace(inner=[x]), "scale": scale},
}


class Scaled(nn.Module):
    """A layer that takes its two tensors from whatever they come in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Any, scale: Tensor | None = None) -> Tensor:
        if scale is None:
            x, scale = x if isinstance(x, list) else (x.x, x.scale)
        x = x.inner[0] if isinstance(x, SimpleNamespace) else x
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale
        return x


@pytest.fixture(params=BATCHES.values(), ids=BATCHES)
def batch(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param(torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True))


def test_tensors_are_found_from_left_to_right(batch: Any) -> None:
    assert [tuple(tensor.shape) for _, tensor in named_tensors(batch)] == [(3, 4), (4,)]


def test_names_are_the_way_to_each_tensor() -> None:
    one = torch.ones(1)
    looked_at = {
        "a": one,
        "b": [one, (one, Pair(one, "text"))],
        "c": SimpleNamespace(d=Sample(one, one)),
        "e": Registered(one, one),
        "f": nn.Linear(1, 1),
        "g": len,
        "h": deque([one]),
        "i": 3,
    }
    looked_at["itself"] = looked_at
    assert [name for name, _ in named_tensors(looked_at)] == [
        *("a", "b.0", "b.1.0", "b.1.1.x", "c.d.x", "c.d.scale", "e.0", "e.1", "h.0"),
    ]
    assert [name for name, _ in named_tensors(one)] == [""]


def test_gradients_of_tensors_in_the_batch_are_compared_and_put_back(batch: Any) -> None:
    model = Scaled()
    leaves = [tensor for _, tensor in named_tensors(batch)]
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    step = TrainingStep(model, StepArguments(batch))
    with KeptState(step).kept():
        assert all(leaf.grad is None for leaf in leaves)
        step.run()
        gradients = gradients_of(step)
    assert list(gradients)[-2:] == ["batch#0", "batch#1"]
    assert all(gradients[name] is not None for name in ("batch#0", "batch#1"))
    profile = memfit.profile(model, batch)
    plan = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["*::aten.tanh"])
    verification = memfit.verify(model, plan, batch)
    assert verification.gradients_equal
    assert verification.peak_bytes == plan.predicted_peak_bytes
    assert_same(
        {str(number): leaf.grad for number, leaf in enumerate(leaves)},
        {str(number): torch.ones_like(leaf) for number, leaf in enumerate(leaves)},
    )


def test_a_fake_profile_is_that_of_the_real_step(batch: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model = Scaled()
    fake, real = memfit.profile(model, batch, mode="fake"), memfit.profile(model, batch)
    assert fake.peak_bytes == peak_of_tensors(real)
    assert described_ops(fake) == described_ops(real)
    assert fake.values == real.values
    assert capfd.readouterr() == ("", "")
