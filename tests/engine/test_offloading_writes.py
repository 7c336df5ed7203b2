"""What is written while it leaves the device: the copy keeps the old content, or whoever reads it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.offloading_plans import EVERYTHING, WINDOWS, NotedCopies, plan_by_op
from torch import Tensor, nn

import memfit

WIDTH = 8


@torch.library.custom_op("memfit_tests::tripled_in_place", mutates_args=("t",))
def tripled_in_place(t: Tensor) -> None:
    t.mul_(3)


class Maker(nn.Module):
    """The sine needs the sum again, which is recomputed, and the sum the product, which is offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = x * self.weight
        return product, (product + 1).sin()


class Writes(nn.Module):
    """Writes to the product after it was read."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.maker = Maker()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        product, made = self.maker(x)
        self.write(product)
        return made.sum() + product.sum()


def batch() -> Tensor:
    return torch.linspace(-2, 2, 4 * WIDTH).reshape(4, WIDTH)


def plan_for(model: nn.Module, window_bytes: int) -> memfit.Plan:
    return plan_by_op(model, batch(), offload=["aten.mul"], recompute=["aten.add"], window_bytes=window_bytes)


def gradient(model: Writes) -> Tensor:
    model.zero_grad()
    model(batch()).backward()
    assert model.maker.weight.grad is not None
    return model.maker.weight.grad.clone()


def add_in_place(product: Tensor) -> None:
    product.add_(1)


def zero_a_part(product: Tensor) -> None:
    product[1:3].zero_()


def write_twice(product: Tensor) -> None:
    product.add_(1)
    product.sin_()


@pytest.mark.parametrize("window_bytes", WINDOWS)
@pytest.mark.parametrize(
    "write", [add_in_place, zero_a_part, write_twice, tripled_in_place], ids=["all", "part", "twice", "library"]
)
def test_a_write_that_is_recorded_waits_for_the_copy(
    write: Callable[[Tensor], Any], window_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Writes(write)
    plan = plan_for(model, window_bytes)
    plain = gradient(model)
    copies = NotedCopies(monkeypatch)
    with memfit.apply(model, plan):
        assert torch.equal(gradient(model), plain)
    assert copies


def unrecorded(plan: memfit.Plan) -> memfit.Plan:
    """Return the plan that records only where the product is made."""
    return replace(plan, recorded_modules=("maker",), hooked_modules=("maker",))


def test_a_write_that_nobody_hears_tears_what_is_still_leaving() -> None:
    model = Writes(add_in_place)
    plan = unrecorded(plan_for(model, EVERYTHING))
    message = r"maker::aten\.mul was changed while it was being copied .* \(version 1, was 0\)"
    with memfit.apply(model, plan):
        loss = model(batch())
        for _ in range(2):
            with pytest.raises(memfit.StaleValueError, match=message):
                loss.backward(retain_graph=True)
        model.write = lambda product: None
        gradient(model)


def test_a_write_that_nobody_hears_comes_too_late_for_what_has_left() -> None:
    model = Writes(add_in_place)
    plain = gradient(model)
    with memfit.apply(model, unrecorded(plan_for(model, window_bytes=0))):
        assert torch.equal(gradient(model), plain)
    # One byte less than the product takes lets it go at once, too; its own size does not.
    num_bytes = batch().nbytes
    with memfit.apply(model, unrecorded(plan_for(model, num_bytes - 1))):
        assert torch.equal(gradient(model), plain)
    with memfit.apply(model, unrecorded(plan_for(model, num_bytes))), pytest.raises(memfit.StaleValueError):
        gradient(model)


def test_a_write_that_is_recorded_after_one_that_is_not() -> None:
    class WritesTwice(Writes):
        def __init__(self) -> None:
            super().__init__(add_in_place)
            self.writer = Writer()

        def forward(self, x: Tensor) -> Tensor:
            product, made = self.maker(x)
            self.write(product)
            return made.sum() + self.writer(product).sum()

    class Writer(nn.Module):
        def forward(self, product: Tensor) -> Tensor:
            return product.mul_(3)

    model = WritesTwice()
    plan = plan_for(model, EVERYTHING)
    with memfit.apply(model, replace(plan, recorded_modules=("maker", "writer"), hooked_modules=("maker",))):
        with pytest.raises(memfit.StaleValueError, match=r"version 1, was 0"):
            gradient(model)
        model.write = lambda product: None
        planned = gradient(model)
    assert torch.equal(planned, gradient(model))


class InPlace(nn.Module):
    """Works in place on what was offloaded, and keeps views of what it held before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        product = x * self.weight
        before = (product[1:] + 1).sin()
        product.neg_()
        after = (product.t()[:3] - 1).cos()
        return before.sum() + after.sum() + product.exp().sum()


@pytest.mark.parametrize("window_bytes", WINDOWS)
@pytest.mark.parametrize(
    ("fates", "num_copies"),
    [
        ({"offload": ["aten.mul"], "recompute": ["aten.neg_", "aten.add", "aten.sub"]}, 1),
        ({"offload": ["aten.mul"], "recompute": ["aten.add", "aten.sub"]}, 1),
        ({"offload": ["aten.mul", "aten.neg_"], "recompute": ["aten.add", "aten.sub"]}, 2),
        ({"offload": ["aten.neg_"], "recompute": ["aten.mul", "aten.add", "aten.sub"]}, 1),
        ({"offload": ["aten.neg_", "aten.add", "aten.sub"]}, 5),
    ],
    ids=["replayed", "saved", "offloaded before and after", "offloaded after", "offloaded around"],
)
def test_ops_that_work_in_place(
    fates: dict[str, list[str]], num_copies: int, window_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = InPlace()
    plan = plan_by_op(model, batch(), **fates, window_bytes=window_bytes)
    model(batch()).backward()
    assert model.weight.grad is not None
    plain = model.weight.grad.clone()
    copies = NotedCopies(monkeypatch)
    with memfit.apply(model, plan):
        model.zero_grad()
        model(batch()).backward()
    assert torch.equal(model.weight.grad, plain)
    assert len(copies) == num_copies


class WrittenUnrecorded(nn.Module):
    """Negates in place, and something writes once more after that."""

    def __init__(self) -> None:
        super().__init__()
        self.negated = Negated()
        self.write: Callable[[Tensor], Any] = add_in_place

    def forward(self, x: Tensor) -> Tensor:
        product, made = self.negated(x)
        self.write(product)
        return made.sum() + product.sum()


class Negated(Maker):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = (x * self.weight).neg_()
        return product, (product + 1).sin()


def test_a_write_that_nobody_hears_tears_the_result_of_a_write_that_is_leaving() -> None:
    model = WrittenUnrecorded()
    plan = plan_by_op(model, batch(), offload=["aten.neg_"], recompute=["aten.add"], window_bytes=EVERYTHING)
    message = r"negated::aten\.neg_ was changed while it was being copied .* \(version 2, was 1\)"
    with memfit.apply(model, replace(plan, recorded_modules=("negated",), hooked_modules=("negated",))):
        with pytest.raises(memfit.StaleValueError, match=message):
            model(batch()).backward()
        model.write = lambda product: None
        model.zero_grad()
        model(batch()).backward()
        planned = model.negated.weight.grad
    model.zero_grad()
    model(batch()).backward()
    assert planned is not None
    assert torch.equal(planned, model.negated.weight.grad)
