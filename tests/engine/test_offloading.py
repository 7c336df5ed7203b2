"""Offloaded values come back as they left: the steps are those of the plain model, bit for bit, in every use."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import cycle

import pytest
import torch
from tests.engine.offloading_plans import (
    EVERYTHING,
    SOME,
    WINDOWS,
    NotedCopies,
    mixed_plan,
    plan_by_op,
    with_decisions,
)
from tests.engine.plans import profile_of
from tests.engine.scenarios import loss_of, trained
from tests.engine.step_comparison import RUN_SEED, Trace, assert_same, look, trace_steps
from tests.engine.zoo import BY_NAME, ZOO, Example
from tests.engine.zoo.example import Step
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.graph.plan import Decision

FAMILIES = ("gpt", "gpt-tied-weights", "resnet", "transformers-llama", "alpha-dropout", "in-place-residuals")


@cache
def plain_trace(example: Example) -> Trace:
    return trace_steps(example.build(), context=example.context)


def assert_same_steps(example: Example, plan: memfit.Plan) -> None:
    model, batch, loss = example.build()
    with memfit.apply(model, plan):
        planned = trace_steps((model, batch, loss), context=example.context)
    assert_same(plain_trace(example), planned)


@pytest.mark.parametrize("window_bytes", WINDOWS)
@pytest.mark.parametrize("name", FAMILIES)
def test_steps_are_those_of_the_plain_model(name: str, window_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = NotedCopies(monkeypatch)
    for seed in range(2):
        assert_same_steps(BY_NAME[name], mixed_plan(profile_of(BY_NAME[name]), seed, window_bytes))
    assert len(copies) >= 12


@pytest.mark.parametrize(
    ("example", "window_bytes"), list(zip(ZOO, cycle(WINDOWS))), ids=[example.name for example in ZOO]
)
def test_every_model_of_the_zoo_may_offload(example: Example, window_bytes: int) -> None:
    assert_same_steps(example, mixed_plan(profile_of(example), 3, window_bytes))


def go_backward_twice(step: Step) -> Trace:
    loss = loss_of(step)
    loss.backward(retain_graph=True)
    loss.backward()
    return look("after two", *step[:2])


def differentiate_twice(step: Step) -> Trace:
    loss = loss_of(step)
    gradients = torch.autograd.grad(loss, trained(step[0]), create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()
    return look("after the second derivative", *step[:2])


def go_forward_twice_and_backward(*, in_turn: bool) -> Callable[[Step], Trace]:
    def scenario(step: Step) -> Trace:
        losses = [loss_of(step), loss_of(step)]
        for loss in losses if in_turn else reversed(losses):
            loss.backward()
        return look("after both", *step[:2])

    scenario.__name__ = "backward_in_turn" if in_turn else "backward_in_reverse"
    return scenario


def raise_in_the_forward_pass(step: Step) -> Trace:
    module = [module for module in step[0].modules() if isinstance(module, nn.Linear)][-1]

    def interrupt(*_: object) -> None:
        raise InterruptedError("stop here")

    handle = module.register_forward_hook(interrupt)
    with pytest.raises(InterruptedError, match="stop here"):
        loss_of(step)
    handle.remove()
    return trace_steps(step, num_steps=1)


def raise_in_the_backward_pass(step: Step) -> Trace:
    middle = trained(step[0])[len(trained(step[0])) // 2]

    def interrupt(_: Tensor) -> None:
        raise InterruptedError("stop here")

    handle = middle.register_hook(interrupt)
    loss = loss_of(step)
    with pytest.raises(InterruptedError, match="stop here"):
        loss.backward(retain_graph=True)
    handle.remove()
    step[0].zero_grad()
    loss.backward()
    return look("after the second try", *step[:2]) | trace_steps(step, num_steps=1)


def forget_to_go_backward(step: Step) -> Trace:
    loss_of(step)
    return trace_steps(step, num_steps=1)


SCENARIOS = (
    go_backward_twice,
    differentiate_twice,
    go_forward_twice_and_backward(in_turn=True),
    go_forward_twice_and_backward(in_turn=False),
    raise_in_the_forward_pass,
    raise_in_the_backward_pass,
    forget_to_go_backward,
)


@pytest.mark.parametrize("window_bytes", WINDOWS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_other_ways_to_use_a_model(scenario: Callable[[Step], Trace], window_bytes: int) -> None:
    example = BY_NAME["gpt"]
    plain, planned = example.build(), example.build()
    torch.manual_seed(RUN_SEED)
    expected = scenario(plain)
    with memfit.apply(planned[0], mixed_plan(profile_of(example), 1, window_bytes)):
        torch.manual_seed(RUN_SEED)
        assert_same(expected, scenario(planned))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("ending", ["backward", "freed", "raised"])
@pytest.mark.parametrize("window_bytes", WINDOWS)
def test_host_copies_go_with_the_graph(window_bytes: int, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = BY_NAME["gpt"]
    plan = mixed_plan(profile_of(example), 1, window_bytes)
    step = example.build()
    copies = NotedCopies(monkeypatch)
    with memfit.apply(step[0], plan), no_garbage_collection():
        if ending == "raised":
            raise_in_the_forward_pass(step)
        else:
            loss = loss_of(step)
            assert copies.num_alive >= 10
            if ending == "backward":
                loss.backward()
            del loss
        assert copies.num_alive == 0


def test_two_threads_go_backward_through_one_graph() -> None:
    example = BY_NAME["gpt"]
    model, batch, loss_function = example.build()
    parameters = trained(model)
    torch.manual_seed(RUN_SEED)
    expected = torch.autograd.grad(loss_of((model, batch, loss_function)), parameters, allow_unused=True)
    with memfit.apply(model, mixed_plan(profile_of(example), 1, SOME)):
        for _ in range(5):
            torch.manual_seed(RUN_SEED)
            loss = loss_of((model, batch, loss_function))
            found: list[tuple[Tensor, ...]] = []
            threads = [
                threading.Thread(
                    target=lambda loss=loss, found=found: found.append(
                        torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
                    )
                )
                for _ in range(3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(found) == 3
            for gradients in found:
                for actual, wanted in zip(gradients, expected, strict=True):
                    assert (actual is None and wanted is None) or torch.equal(actual, wanted)


class Computed(nn.Module):
    """One function of a batch and of a weight like it."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight).abs().square().float().sum()


def numbers(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (4, 6)) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(2))


def assert_same_gradient(model: nn.Module, plan: memfit.Plan, x: Tensor) -> None:
    def gradients() -> list[Tensor]:
        torch.manual_seed(RUN_SEED)
        model.zero_grad()
        model(x).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    assert plain
    with memfit.apply(model, plan):
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))


@pytest.mark.parametrize("window_bytes", WINDOWS)
@pytest.mark.parametrize(
    ("compute", "offloaded", "dtype"),
    [
        (lambda x, w: (x * w).tanh().sin(), "aten.tanh", torch.bfloat16),
        (lambda x, w: (x * w).exp() * x, "aten.exp", torch.complex64),
        (lambda x, w: ((x * w).conj() * w).exp(), "aten.mul", torch.complex64),
        (lambda x, w: torch.where(x * w > 0, x * w, w), "aten.gt", torch.float32),
        (lambda x, w: torch.native_dropout(x * w, 0.5, True)[0].sin(), "aten.native_dropout", torch.float32),
        (lambda x, w: (x * w).t().tanh().t()[1:, ::2].sin(), "aten.tanh", torch.float32),
        (lambda x, w: (x * w).expand(3, 4, 6).contiguous()[1].t().sin(), "aten.clone", torch.float32),
        (lambda x, w: (x * w).tanh().chunk(2)[1].sin(), "aten.tanh", torch.float32),
    ],
    ids=["bf16", "complex", "conjugated", "bool", "random", "transposed", "part of a copy", "second chunk"],
)
def test_values_of_every_kind(
    compute: Callable[[Tensor, Tensor], Tensor],
    offloaded: str,
    dtype: torch.dtype,
    window_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Computed(compute, numbers(dtype) / 2), numbers(dtype)
    plan = plan_by_op(model, x, offload=[offloaded], window_bytes=window_bytes)
    copies = NotedCopies(monkeypatch)
    assert_same_gradient(model, plan, x)
    assert copies


def test_an_op_may_have_outputs_of_every_fate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Computed(lambda x, w: functional.layer_norm(x * w, (6,)).sin(), numbers())
    plan = plan_by_op(model, numbers(), offload=["aten.native_layer_norm"])
    name = next(name for name in plan.decisions if "native_layer_norm" in name)
    plan = with_decisions(plan, {f"{name}.1": Decision.RECOMPUTE, f"{name}.2": Decision.SAVE})
    copies = NotedCopies(monkeypatch)
    assert_same_gradient(model, plan, numbers())
    assert len(copies) == 2


def test_what_is_replayed_may_start_from_what_was_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd itself saves none of what is offloaded here: only records read it."""
    model = Computed(lambda x, w: ((x * w) + 1).sin(), numbers())
    plan = plan_by_op(model, numbers(), offload=["aten.mul"], recompute=["aten.add"])
    copies = NotedCopies(monkeypatch)
    assert_same_gradient(model, plan, numbers())
    assert len(copies) == 2


def test_hooks_around_the_model_keep_what_would_be_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Computed(lambda x, w: (x * w).tanh().sin(), numbers())
    plan = plan_by_op(model, numbers(), offload=["aten.tanh"])
    copies = NotedCopies(monkeypatch)
    with torch.autograd.graph.save_on_cpu():
        assert_same_gradient(model, plan, numbers())
    assert not copies


def test_tensors_without_memory_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Computed(lambda x, w: (x * w).tanh().sin(), numbers())
    plan = plan_by_op(model, numbers(), offload=["aten.tanh"])
    model.to("meta")
    copies = NotedCopies(monkeypatch)
    with memfit.apply(model, plan):
        model(numbers().to("meta")).backward()
    assert not copies
    assert model.weight.grad is not None


def test_what_a_raw_kernel_may_write_later_is_not_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of a factory: at that time there is nothing in it."""

    def compute(x: Tensor, w: Tensor) -> Tensor:
        canvas = torch.empty_like(x)
        canvas.data.copy_(x)
        return (canvas * w).sin()

    model = Computed(compute, numbers())
    plan = plan_by_op(model, numbers(), offload=["aten.mul"])
    plan = with_decisions(plan, {"::aten.empty_like#0": Decision.OFFLOAD})
    copies = NotedCopies(monkeypatch)
    assert_same_gradient(model, plan, numbers())
    assert len(copies) == 2


def test_an_op_that_hands_back_its_argument_has_made_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As dropout does with nothing to drop out."""
    model = Computed(lambda x, w: torch.native_dropout(w[x.shape[0] :], 0.5, True)[0].sin() + x.sum(), numbers())
    plan = plan_by_op(model, numbers())
    plan = with_decisions(plan, {"::aten.native_dropout#0": Decision.OFFLOAD})
    # One whose weight no tape has met yet.
    model = copy.deepcopy(model)
    copies = NotedCopies(monkeypatch)
    assert_same_gradient(model, plan, numbers())
    assert not copies


def test_nothing_is_sent_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Computed(lambda x, w: (x * w).tanh().sin(), numbers())
    plan = plan_by_op(model, numbers(), offload=["aten.tanh"], window_bytes=EVERYTHING)
    copies = NotedCopies(monkeypatch)
    with memfit.apply(model, plan):
        with torch.no_grad():
            model(numbers())
        assert not copies
        model(numbers())
        assert len(copies) == 1


def test_backward_over_a_batch_of_gradients_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6), nn.Tanh())
    plan = plan_by_op(model, numbers(), offload=["aten.tanh"], recompute=["aten.addmm"], loss=torch.sum)
    parameters = list(model.parameters())

    def jacobian() -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(numbers()).sum(0), parameters, torch.eye(6), is_grads_batched=True)

    plain = jacobian()
    copies = NotedCopies(monkeypatch)
    with memfit.apply(model, plan):
        assert all(torch.equal(a, b) for a, b in zip(plain, jacobian(), strict=True))
    assert len(copies) == 2
