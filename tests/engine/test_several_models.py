"""Several planned models in one step, one inside of another, and forward and backward in other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.plans import every_layer, every_second_layer, every_value
from tests.engine.scenarios import assert_same_under, loss_of
from tests.engine.step_comparison import RUN_SEED, Trace, assert_same, look, trace_steps
from tests.engine.zoo import BY_NAME, Example
from tests.engine.zoo.example import Step
from torch import Tensor, nn

import memfit

GPT = BY_NAME["gpt"]
RESNET = BY_NAME["resnet"]


def in_thread(work: Callable[[], Any]) -> Any:
    """Run ``work`` in another thread and return its result, or raise what it raised."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def interleave(first: Step, second: Step) -> Trace:
    """Forward, forward, backward, backward, in two orders."""
    trace: Trace = {}
    torch.manual_seed(RUN_SEED)
    for number, backwards in enumerate(((0, 1), (1, 0))):
        losses = [loss_of(first), loss_of(second)]
        for which in backwards:
            losses[which].backward()
        trace |= look(f"round {number}, first", first[0]) | look(f"round {number}, second", second[0])
    return trace


@pytest.mark.parametrize("second", ["gpt", "resnet", "mixture-of-experts"])
def test_two_planned_models_interleave(second: str) -> None:
    other = BY_NAME[second]
    plain = interleave(GPT.build(), other.build())
    left, right = GPT.build(), other.build()
    with memfit.apply(left[0], every_value(GPT)), memfit.apply(right[0], every_layer(other)):
        assert_same(plain, interleave(left, right))


def test_a_planned_and_a_plain_model_interleave() -> None:
    plain = interleave(GPT.build(), RESNET.build())
    left, right = GPT.build(), RESNET.build()
    with memfit.apply(left[0], every_layer(GPT)):
        assert_same(plain, interleave(left, right))


def test_one_planned_model_feeds_another() -> None:
    def chain(encoder: nn.Module, decoder: nn.Module) -> Trace:
        torch.manual_seed(RUN_SEED)
        images = torch.randn(4, 3, 14, 14)
        features = encoder(images)
        loss = decoder(nn.functional.pad(features, (0, 4))).square().mean()
        loss.backward()
        return look("chain", encoder, loss=loss) | look("chain, decoder", decoder)

    smooth = Example("nine-wide", BY_NAME["frozen-middle"].make, has_blocks=True)

    class First(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[0]

    plain = chain(RESNET.build()[0], First(smooth.build()[0]))
    encoder, inner = RESNET.build()[0], smooth.build()[0]
    with memfit.apply(encoder, every_layer(RESNET)), memfit.apply(inner, every_value(smooth)):
        assert_same(plain, chain(encoder, First(inner)))


def test_a_planned_model_inside_of_a_plain_one() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.before = nn.Conv2d(3, 3, 1)
            self.inner = inner
            self.after = nn.Linear(5, 5)

        def forward(self, images: Tensor) -> Tensor:
            return self.after(torch.tanh(self.inner(torch.relu(self.before(images)))))

    def build() -> tuple[nn.Module, Any, Any]:
        inner, images, loss = RESNET.build()
        return Outer(inner), images, loss

    plain = trace_steps(build())
    step = build()
    with memfit.apply(step[0].inner, every_layer(RESNET)):
        assert_same(plain, trace_steps(step))


@pytest.mark.parametrize("plan_for", [every_layer, every_value], ids=lambda plan_for: plan_for.__name__)
@pytest.mark.parametrize("name", ["gpt", "resnet", "in-place-residuals"])
def test_backward_in_another_thread_than_forward(name: str, plan_for: Callable[[Example], memfit.Plan]) -> None:
    def scenario(step: Step) -> Trace:
        model, batch, _ = step
        loss = loss_of(step)
        in_thread(loss.backward)
        trace = look("backward elsewhere", model, batch)
        loss = in_thread(lambda: loss_of(step))
        loss.backward()
        trace |= look("forward elsewhere", model, batch)
        losses = [in_thread(lambda: loss_of(step)) for _ in range(2)]
        for loss in losses:
            in_thread(loss.backward)
        return trace | look("all elsewhere", model, batch)

    assert_same_under(BY_NAME[name], plan_for, scenario)


def test_two_models_run_in_two_threads_at_once() -> None:
    # Models without randomness: torch's generator is one for all threads, so draws would depend on the timing.
    examples = [RESNET, BY_NAME["smooth-fp64"]]

    def steps_of(step: Step, barrier: threading.Barrier | None) -> Trace:
        trace: Trace = {}
        for number in range(8):
            if barrier is not None:
                barrier.wait(timeout=60)
            step[0].zero_grad()
            loss = loss_of(step)
            loss.backward()
            trace |= look(f"step {number}", step[0], loss=loss)
        return {path: seen for path, seen in trace.items() if "random state" not in path}

    plain = [steps_of(example.build(), None) for example in examples]
    steps = [example.build() for example in examples]
    barrier = threading.Barrier(2)
    planned: dict[int, Trace] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            planned[index] = steps_of(steps[index], barrier)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    with memfit.apply(steps[0][0], every_layer(examples[0])), memfit.apply(steps[1][0], every_value(examples[1])):
        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    for index in range(2):
        assert_same(plain[index], planned[index])


def test_one_model_planned_in_two_ways_on_two_copies() -> None:
    plain = trace_steps(GPT.build())
    for plan in (every_layer(GPT), every_second_layer(GPT)):
        step = GPT.build()
        with memfit.apply(step[0], plan):
            assert_same(plain, trace_steps(step))
