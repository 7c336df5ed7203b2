"""Changes that are not recorded, or not counted: the gradients are the plain step's, or there is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.plans import dropping
from torch import Tensor, nn
from torch.nn import functional

import memfit

WIDTH = 8


@torch.library.custom_op("memfit_tests::doubled_in_place", mutates_args=("t",))
def doubled_in_place(t: Tensor) -> None:
    t.mul_(2)


class Reader(nn.Module):
    """Its GELU needs a sum again, and the sum what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        return functional.gelu(x * self.weight + read)


class Model(nn.Module):
    """Reads, and does something to what was read afterwards, with too many ops around to record them all."""

    def __init__(self, change: Callable[[Model, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.reader, self.norm = Reader(), nn.BatchNorm1d(WIDTH, momentum=0.5)
        self.change = change

    def forward(self, x: Tensor, read: Tensor | None = None) -> Tensor:
        read = self.norm.running_mean if read is None else read * 1
        assert read is not None
        made = self.reader(x, read)
        rest = x
        for _ in range(60):
            rest = rest * 1.01
        also = self.change(self, read)
        return made.sum() + rest.sum() + (0 if also is None else also.sum())


def batch() -> Tensor:
    return torch.linspace(-2, 2, 4 * WIDTH).reshape(4, WIDTH)


def gradients(model: nn.Module, *inputs: Tensor, between: Callable[[], Any] = lambda: None) -> list[Tensor]:
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
    loss = model(*inputs)
    between()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def plan_for(model: nn.Module, *inputs: Tensor, recompute: str = "*") -> memfit.Plan:
    return dropping(memfit.profile(model, inputs), f"{recompute}*")


def assert_same_gradients(model: nn.Module, plan: memfit.Plan, *inputs: Tensor) -> None:
    plain = gradients(model, *inputs)
    with memfit.apply(model, plan):
        planned = gradients(model, *inputs)
    assert plain
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))


def test_statistics_that_a_batch_norm_updates_later() -> None:
    model = Model(lambda model, _: model.norm(batch() + 3))
    plan = plan_for(model, batch(), recompute="reader")
    assert plan.recorded_modules == ("reader", "norm")
    assert_same_gradients(model, plan, batch())


def test_an_op_of_a_library_that_counts_its_write_before_it_is_recorded() -> None:
    model = Model(lambda _, read: doubled_in_place(read))
    assert_same_gradients(model, plan_for(model, batch(), batch()), batch(), batch())


class Writer(nn.Module):
    def forward(self, written: Tensor) -> Tensor:
        return written.add_(1)


class WritesTwice(nn.Module):
    """Two writes to what was read: the first one's branch is not profiled, so that nothing is recorded there."""

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.writer = Reader(), Writer()
        self.writes_first = False

    def forward(self, x: Tensor) -> Tensor:
        read, rest = x.clone(), x
        made = self.reader(x, read)
        for _ in range(60):
            rest = rest * 1.01
        if self.writes_first:
            read.mul_(3)
        return made.sum() + self.writer(read).sum() + rest.sum()


def test_a_write_that_was_not_recorded_before_one_that_is() -> None:
    model = WritesTwice()
    plan = plan_for(model, batch(), recompute="reader")
    assert plan.recorded_modules == ("reader", "writer")
    assert_same_gradients(model, plan, batch())
    model.writes_first = True
    with memfit.apply(model, plan), pytest.raises(memfit.StaleValueError, match="was changed between"):
        gradients(model, batch())


class Summed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().square().sum()


def test_batch_norm_without_weights_under_an_autocast_that_the_profile_did_not_have() -> None:
    torch.manual_seed(0)
    model, x = Summed(nn.Linear(64, 64), nn.BatchNorm1d(64, affine=False), nn.GELU()), torch.randn(4, 64)
    plan = plan_for(model, x)
    assert any("native_batch_norm" in name and decision == "recompute" for name, decision in plan.decisions.items())
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_gradients(model, plan, x)


class WritesPart(nn.Module):
    """Writes through a view whose elements do not fill the storage: eight bytes each, in twelve."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, 3))
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        read = x.clone()
        made = functional.gelu(read + self.weight)
        if self.writes:
            torch.view_as_complex(read[:2]).mul_(2)
        return made.sum() + (read * 1).sum()


def test_a_copy_has_all_of_what_is_about_to_be_written_in_part() -> None:
    model, x = WritesPart(), torch.arange(3.0)
    plan = plan_for(model, x)
    model.writes = True
    assert_same_gradients(model, plan, x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.linspace(1, 2, WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu((x + self.bias) * self.weight).sum()


def test_a_tensor_of_inference_mode_that_is_refilled_before_backward() -> None:
    model = Scaled()
    plan = plan_for(model, batch())

    def refilled() -> list[Tensor]:
        with torch.inference_mode():
            buffer = batch()
        with torch.inference_mode(False):
            loss = model(buffer)
        with torch.inference_mode():
            buffer.fill_(5)
        model.zero_grad()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = refilled()
    with memfit.apply(model, plan):
        assert all(torch.equal(a, b) for a, b in zip(plain, refilled(), strict=True))


class OwnsSparse(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.adjacency @ x)


def test_a_model_that_owns_a_sparse_tensor_is_told_of_a_change_all_the_same() -> None:
    model, x = OwnsSparse(), batch()
    with memfit.apply(model, plan_for(model, x)), pytest.raises(memfit.StaleValueError, match="was changed between"):
        gradients(model, x, between=lambda: x.add_(1))


def test_where_saved_tensor_hooks_are_switched_off_the_model_runs_plain() -> None:
    model = Scaled()
    plan = plan_for(model, batch())
    plain = gradients(model, batch())
    with memfit.apply(model, plan), torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        planned = gradients(model, batch())
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))


class Computed(nn.Module):
    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight).sum()


def in_nested_tensors(x: Tensor, weight: Tensor) -> Tensor:
    product = x @ weight
    nested = torch.nested.as_nested_tensor([product[:1], product[1:]])
    return functional.gelu(nested).to_padded_tensor(0.0)


def halved_under_a_view(x: Tensor, weight: Tensor) -> Tensor:
    product = x @ weight
    rows = product[:2]
    torch._foreach_mul_([product], 0.5)
    return functional.gelu(rows)


def test_a_write_that_torch_does_not_count_inside_dispatch_modes() -> None:
    model = Computed(halved_under_a_view)
    assert_same_gradients(model, plan_for(model, batch()), batch())


@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    "compute",
    [
        in_nested_tensors,
        lambda x, weight: (functional.gelu(x @ weight) * 1j).imag,
        lambda x, weight: torch.sparse.mm(batch()[:, :4].to_sparse_csr(), functional.gelu(x @ weight), "amax"),
    ],
    ids=["nested", "complex number", "sparse reduction"],
)
def test_what_once_could_not_be_profiled(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Computed(compute)
    assert_same_gradients(model, plan_for(model, batch()), batch())


def test_backward_over_a_batch_of_gradients_replays_dropout(engine: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, WIDTH))
    plan = memfit.plan(memfit.profile(model, batch()), strategy=memfit.NoCheckpointing(), force_recompute=["*"])
    parameters = list(model.parameters())

    def jacobian() -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        output = model(batch()).sum(0)
        return torch.autograd.grad(output, parameters, torch.eye(WIDTH), is_grads_batched=True)

    plain = jacobian()
    with memfit.apply(model, plan):
        if engine == "C++":
            assert all(torch.equal(a, b) for a, b in zip(plain, jacobian(), strict=True))
        else:
            # It cannot step out of the transform that backward runs in, which allows no random numbers.
            with pytest.raises(RuntimeError, match="random operations inside of vmap"):
                jacobian()
