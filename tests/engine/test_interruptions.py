"""Exceptions in the middle of forward and backward: the steps after them are those of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.plans import LAYER_PLANS, VALUE_PLANS, PlanFor
from tests.engine.scenarios import Scenario, assert_same_under, loss_of, trained
from tests.engine.step_comparison import Trace, call, clear_gradients, look, trace_steps
from tests.engine.zoo import BY_NAME
from tests.engine.zoo.example import Step
from torch import nn

EXAMPLES = ("gpt", "resnet", "mixture-of-experts", "in-place-residuals")


class InterruptionError(RuntimeError):
    """What these tests raise."""


def inner_module(model: nn.Module) -> nn.Module:
    """Return a linear layer or convolution deep inside of a block, about in the middle of the model."""
    deep = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    return deep[len(deep) // 2]


def interrupt_forward(error: type[BaseException]) -> Scenario:
    """Return a scenario in which an op of a block's forward raises, twice, between normal steps."""

    def scenario(step: Step) -> Trace:
        model, batch, _ = step

        def interrupt(*_: Any) -> None:
            raise error("stop here")

        trace = trace_steps(step, num_steps=1)
        for _ in range(2):
            handle = inner_module(model).register_forward_pre_hook(interrupt)
            with pytest.raises(error, match="stop here"):
                call(model, batch)
            handle.remove()
        return trace | {f"then {path}": seen for path, seen in trace_steps(step, num_steps=2).items()}

    scenario.__name__ = f"{error.__name__}-in-forward"
    return scenario


def interrupt_backward(error: type[BaseException]) -> Scenario:
    """Return a scenario in which a gradient hook raises in the middle of backward."""

    def scenario(step: Step) -> Trace:
        model, batch, _ = step

        def interrupt(_: Any) -> None:
            raise error("stop here")

        handle = trained(model)[len(trained(model)) // 2].register_hook(interrupt)
        with pytest.raises(error, match="stop here"):
            loss_of(step).backward()
        handle.remove()
        clear_gradients(model, batch)
        return trace_steps(step, num_steps=2)

    scenario.__name__ = f"{error.__name__}-in-backward"
    return scenario


def go_backward_again_after_an_interruption(step: Step) -> Trace:
    """A backward that keeps its graph raises in the middle; the same graph then gives its gradients."""
    model, batch, _ = step

    def interrupt(_: Any) -> None:
        raise InterruptionError("stop here")

    handle = trained(model)[len(trained(model)) // 2].register_hook(interrupt)
    loss = loss_of(step)
    with pytest.raises(InterruptionError, match="stop here"):
        loss.backward(retain_graph=True)
    handle.remove()
    clear_gradients(model, batch)
    loss.backward()
    return look("after the second try", model, batch) | trace_steps(step, num_steps=1)


def interrupt_inside_a_function_that_catches(step: Step) -> Trace:
    """The model's caller catches an exception and goes on with what it has, as a retry loop does."""
    model, batch, _ = step
    fail_once: list[bool] = [True]

    def interrupt(*_: Any) -> None:
        if fail_once.pop() if fail_once else False:
            raise InterruptionError

    handle = inner_module(model).register_forward_hook(interrupt)
    try:
        call(model, batch)
    except InterruptionError:
        loss_of(step).backward()
    handle.remove()
    return look("after the retry", model, batch) | trace_steps(step, num_steps=1)


SCENARIOS: tuple[Callable[[Step], Trace], ...] = (
    interrupt_forward(InterruptionError),
    interrupt_forward(KeyboardInterrupt),
    interrupt_backward(InterruptionError),
    interrupt_backward(KeyboardInterrupt),
    go_backward_again_after_an_interruption,
    interrupt_inside_a_function_that_catches,
)


@pytest.mark.parametrize("plan_for", [LAYER_PLANS[0], VALUE_PLANS[0]], ids=lambda plan_for: plan_for.__name__)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("name", EXAMPLES)
def test_interrupted_model_goes_on_as_the_plain_one(name: str, scenario: Scenario, plan_for: PlanFor) -> None:
    assert_same_under(BY_NAME[name], plan_for, scenario)
