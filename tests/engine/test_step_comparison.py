"""The comparison itself: equal runs are equal, and each kind of difference is found and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.step_comparison import StepsDifferError, assert_same, leaves, trace_steps
from tests.engine.zoo import ZOO, Example
from torch import Tensor, nn


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("example", ZOO, ids=str)
def test_two_plain_runs_are_the_same_and_train_something(example: Example, training: bool) -> None:
    first = trace_steps(example.build(), training=training, context=example.context)
    assert_same(first, trace_steps(example.build(), training=training, context=example.context))
    for number in range(3):
        assert math.isfinite(first[f"step {number}, loss"].numbers)
        gradients = [seen for path, seen in first.items() if path.startswith(f"step {number}, gradient of")]
        numbers = [gradient.numbers for gradient in gradients if gradient is not None]
        assert any(gradient.count_nonzero() for gradient in numbers)
        assert all(gradient.isfinite().all() for gradient in numbers)


class Watched(nn.Module):
    """A model on which a test changes one thing."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(2))
        self.num_calls = 0
        self.history: list[float] = []
        self.meddle: Callable[[Watched, Tensor], Tensor] = lambda model, hidden: hidden

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.num_calls += 1
        self.seen += 1
        hidden = self.meddle(self, self.first(x))
        return {"hidden": [hidden.detach()], "loss": self.last(hidden.tanh()).mean()}


def drop_a_gradient(model: Watched, hidden: Tensor) -> Tensor:
    return hidden.detach()


def draw(model: Watched, hidden: Tensor) -> Tensor:
    torch.rand(1)
    return hidden


def count_twice(model: Watched, hidden: Tensor) -> Tensor:
    model.num_calls += 1
    return hidden


def append(model: Watched, hidden: Tensor) -> Tensor:
    model.history.append(1.0)
    return hidden


def update_buffer(model: Watched, hidden: Tensor) -> Tensor:
    model.seen[1] += 1e-6
    return hidden


def nudge(model: Watched, hidden: Tensor) -> Tensor:
    return torch.nextafter(hidden.detach(), torch.tensor(9.0)) + (hidden - hidden.detach())


def change_layout(model: Watched, hidden: Tensor) -> Tensor:
    return hidden.T.contiguous().T


def nudge_backward(model: Watched, hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda gradient: gradient * (1 + 2**-20))
    return hidden


@pytest.mark.parametrize(
    ("meddle", "first_difference"),
    [
        (nudge, r"step 0, output\['hidden'\]\[0\]: 12 of 12 numbers differ, by up to"),
        (change_layout, r"step 0, output\['hidden'\]\[0\]: expected float32\[4, 3\], strides \(3, 1\).* got"),
        (nudge_backward, r"step 0, gradient of first.weight: 9 of 9 numbers differ"),
        (drop_a_gradient, r"step 0, gradient of first.weight: expected float32.*, got None"),
        (update_buffer, r"step 0, buffer seen: 1 of 2 numbers differ, by up to 9.54e-07"),
        (count_twice, r"step 0, attribute num_calls: expected 1, got 2"),
        (append, r"step 0, length of attribute history: expected 0, got 1"),
        (draw, r"step 0, random state: \d+ of \d+ numbers differ"),
    ],
)
def test_first_difference_is_named(meddle: Callable[[Watched, Tensor], Tensor], first_difference: str) -> None:
    def build() -> Watched:
        torch.manual_seed(0)
        return Watched()

    batch = torch.linspace(-1, 1, 12).view(4, 3)
    plain, other = build(), build()
    other.meddle = meddle
    with pytest.raises(StepsDifferError, match=first_difference):
        assert_same(trace_steps((plain, batch, None)), trace_steps((other, batch, None)))


def sparse(places: list[int], values: list[float]) -> Tensor:
    return torch.sparse_coo_tensor([places], values, (2,), check_invariants=True)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0])),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
        (torch.tensor(3), torch.tensor(3)),
        (sparse([0, 0], [1.0, 2.0]), sparse([0], [3.0])),
    ],
    ids=["nan", "conjugate", "empty", "no-dimension", "sparse"],
)
def test_equal_numbers_are_the_same(left: Tensor, right: Tensor) -> None:
    assert_same(dict(leaves("it", left)), dict(leaves("it", right)))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([math.nan]), torch.tensor([1.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1.0]), torch.tensor([1.0], requires_grad=True)),
        (torch.ones(1, 2), torch.ones(2, 1)),
        ([torch.ones(1)], [torch.ones(1), torch.ones(1)]),
        ({"a": 1}, {"a": 1, "b": 1}),
        (None, torch.zeros(1)),
        (1, True),
    ],
    ids=["signed-zero", "nan", "dtype", "requires-grad", "shape", "length", "keys", "none", "bool"],
)
def test_unequal_things_differ(left: Any, right: Any) -> None:
    with pytest.raises(StepsDifferError):
        assert_same(dict(leaves("it", left)), dict(leaves("it", right)))


def test_the_sign_of_zero_is_counted_as_a_difference() -> None:
    left, right = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    with pytest.raises(StepsDifferError, match=r"it: 1 of 2 numbers differ, by up to 0 "):
        assert_same(dict(leaves("it", left)), dict(leaves("it", right)))
