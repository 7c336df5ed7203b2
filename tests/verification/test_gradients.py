"""How two steps' gradients are compared."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.verification.gradients import difference_between, gradients_of, relative_error

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("plain", "other", "expected"),
    [
        ([1.0, 4.0], [1.0, 4.0], 0.0),
        ([1.0, 4.0], [1.0, 3.0], 0.25),
        ([2.0, -4.0], [1.0, -4.0], 0.25),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 1e-30], INF),
        ([NAN, 4.0], [NAN, 2.0], 0.5),
        ([NAN, 4.0], [NAN, 4.0], 0.0),
        ([NAN, 4.0], [1.0, 4.0], INF),
        ([1.0, 4.0], [NAN, 4.0], INF),
        ([INF, 4.0], [INF, 3.0], 0.25),
        ([INF, 4.0], [-INF, 4.0], INF),
        ([1e300, 0.0], [-1e300, 0.0], 2.0),
        ([], [], 0.0),
    ],
)
def test_the_error_is_relative_to_the_largest_plain_gradient(
    plain: list[float], other: list[float], expected: float
) -> None:
    def tensor(numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64)

    assert relative_error(tensor(plain), tensor(other)) == expected


def test_a_gradient_that_only_one_step_has_is_infinitely_wrong() -> None:
    assert relative_error(None, torch.ones(2)) == INF
    assert relative_error(torch.ones(2), None) == INF
    assert relative_error(torch.ones(2), torch.ones(3)) == INF
    assert relative_error(None, None) == 0.0


def test_complex_gradients_are_compared_by_their_magnitude() -> None:
    assert relative_error(torch.tensor([3 + 4j]), torch.tensor([0j])) == 1.0


@given(st.lists(st.floats(width=32), min_size=1, max_size=6), st.lists(st.floats(width=32), min_size=1, max_size=6))
def test_the_error_is_never_nan_and_zero_only_for_equal_numbers(plain: list[float], other: list[float]) -> None:
    error = relative_error(torch.tensor(plain), torch.tensor(other))
    equal = len(plain) == len(other) and all(a == b or (a != a and b != b) for a, b in zip(plain, other, strict=True))
    assert error >= 0
    assert (error == 0) == equal


def test_differences_are_named_and_a_sign_of_zero_is_one() -> None:
    plain = {"a": torch.zeros(2), "b": torch.ones(2), "c": None}
    other = {"a": -torch.zeros(2), "b": torch.ones(2), "c": None}
    difference = difference_between(plain, other)
    assert difference.names == ("a",)
    assert difference.max_error == 0.0


def test_gradients_of_sparse_embeddings_and_of_the_batch_are_copied() -> None:
    model = nn.Embedding(3, 2, sparse=True)
    scale = torch.ones(2, requires_grad=True)
    step = TrainingStep(model, StepArguments((torch.tensor([1, 1]),), lambda output: (output * scale).sum()))
    step.run()
    gradients = gradients_of(step)
    assert list(gradients) == ["weight"]
    assert gradients["weight"] is not None
    assert gradients["weight"].tolist() == [[0, 0], [2, 2], [0, 0]]
    leaf = torch.ones(2, requires_grad=True)
    step = TrainingStep(nn.Linear(2, 1), StepArguments(leaf))
    step.run()
    assert list(gradients_of(step)) == ["weight", "bias", "batch#0"]


def test_gradients_that_are_nothing_but_rounding_are_nothing_beside_the_others() -> None:
    plain = {"weight": torch.tensor([3.0, 4.0]), "bias": torch.tensor([1e-9]), "unused": None}
    difference = difference_between(plain, plain | {"bias": torch.tensor([-1e-9])})
    assert difference.names == ("bias",)
    assert difference.max_error == pytest.approx(2.0)
    assert difference.distance == pytest.approx(2e-9 / 5.0)
    assert difference_between(plain, plain | {"weight": torch.tensor([3.0, 3.0])}).distance == pytest.approx(0.2)
    for other in (None, torch.tensor([3.0, NAN])):
        assert difference_between(plain, plain | {"weight": other}).distance == INF
