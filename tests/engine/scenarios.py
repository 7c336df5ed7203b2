"""Ways to use a model beyond forward, backward, step. A scenario takes a step and returns what was seen of it.

A scenario runs on the plain model and on a planned one, which must not differ. Each begins from one seed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tests.engine.plans import PlanFor
from tests.engine.step_comparison import (
    RUN_SEED,
    Trace,
    assert_same,
    call,
    clear_gradients,
    look,
    scalar_loss,
    trace_steps,
)
from tests.engine.zoo import Example
from tests.engine.zoo.example import Step
from torch import Tensor, nn

import memfit

Scenario = Callable[[Step], Trace]


def assert_same_under(example: Example, plan_for: PlanFor, scenario: Scenario) -> None:
    """Run ``scenario`` on the plain model and on a planned one and compare all that was seen."""
    plan = plan_for(example)
    plain, planned = example.build(), example.build()
    torch.manual_seed(RUN_SEED)
    expected = scenario(plain)
    with memfit.apply(planned[0], plan):
        torch.manual_seed(RUN_SEED)
        assert_same(expected, scenario(planned))


def loss_of(step: Step) -> Tensor:
    """Run forward and return the loss."""
    model, batch, loss = step
    return scalar_loss(call(model, batch), loss)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def accumulate_gradients(step: Step) -> Trace:
    """Forward and backward three times without clearing, then normal steps."""
    model, batch, _ = step
    for _ in range(3):
        loss_of(step).backward()
    return look("after three", model, batch) | trace_steps(step)


def forward_several_times_before_backward(step: Step) -> Trace:
    """Three forwards; then backward of the second, of the first, of the third."""
    model, batch, _ = step
    losses = [loss_of(step) for _ in range(3)]
    trace: Trace = {}
    for number in (1, 0, 2):
        losses[number].backward()
        trace |= look(f"after loss {number}", model, batch)
    return trace


def sum_several_losses(step: Step) -> Trace:
    """Three forwards and one backward through all of them."""
    model, batch, _ = step
    total = sum(loss_of(step) for _ in range(3))
    total.backward()
    return look("after the sum", model, batch, total=total)


def backward_twice(step: Step) -> Trace:
    """Two backwards through one graph, the second one letting it go."""
    model, batch, _ = step
    loss = loss_of(step)
    loss.backward(retain_graph=True)
    trace = look("after the first", model, batch)
    loss.backward()
    return trace | look("after the second", model, batch) | trace_steps(step)


def differentiate_twice(step: Step) -> Trace:
    """A gradient penalty: the gradients' own graph is differentiated."""
    model, batch, _ = step
    loss = loss_of(step)
    gradients = torch.autograd.grad(loss, trained(model), create_graph=True, allow_unused=True)
    penalty = sum(gradient.square().sum() for gradient in gradients if gradient is not None)
    (loss + 0.1 * penalty).backward()
    return look("after the penalty", model, batch, gradients=gradients, penalty=penalty)


def differentiate_by_some(step: Step) -> Trace:
    """autograd.grad by a few parameters, then by the others; then a backward that fills only one gradient."""
    model, batch, _ = step
    parameters = trained(model)
    loss = loss_of(step)
    few, others = parameters[1::3], parameters[::3]
    first = torch.autograd.grad(loss, few, retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(loss, others, allow_unused=True)
    loss_of(step).backward(inputs=parameters[-1:])
    return look("after parts", model, batch, first=first, second=second)


def never_go_backward(step: Step) -> Trace:
    """Forwards whose loss is dropped, and whose output outlives the next step."""
    model, batch, loss = step
    kept = call(model, batch)
    dropped = scalar_loss(call(model, batch), loss)
    del dropped
    trace = trace_steps(step)
    return trace | look("at the end", model, batch, kept=kept)


def go_backward_from_the_middle(step: Step) -> Trace:
    """Two losses on one output: each backward walks part of the graph, the first one keeps it."""
    model, batch, loss = step
    output = call(model, batch)
    value = scalar_loss(output, loss)
    (3 * value).backward(retain_graph=True)
    trace = look("after one", model, batch)
    value.square().backward()
    return trace | look("after both", model, batch)


def evaluate_in_between(step: Step) -> Trace:
    """Evaluation under no_grad and inference_mode between forward and backward and between steps."""
    model, batch, loss = step
    trace: Trace = {}
    for number in range(2):
        clear_gradients(model, batch)
        value = loss_of(step)
        model.eval()
        with torch.no_grad():
            quiet = call(model, batch)
        with torch.inference_mode():
            quieter = scalar_loss(call(model, batch), loss).item()
        model.train()
        value.backward()
        trace |= look(f"round {number}", model, batch, quiet=quiet, quieter=quieter)
    return trace


def switch_modes(step: Step) -> Trace:
    """Gradients in eval mode between steps in train mode."""
    return (
        trace_steps(step, num_steps=1)
        | {f"eval {path}": seen for path, seen in trace_steps(step, training=False, num_steps=1).items()}
        | {f"again {path}": seen for path, seen in trace_steps(step, num_steps=2).items()}
    )


def train_with_adam(step: Step) -> Trace:
    """Four steps with Adam and clipped gradients."""

    def clipped_adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, 0.1) and None)
        return optimizer

    return trace_steps(step, num_steps=4, optimizer=clipped_adam)


def step_inside_backward(step: Step) -> Trace:
    """The optimizer steps for each parameter as soon as its gradient is there, while backward goes on."""
    model, batch, _ = step

    def update(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.05)
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in trained(model)]
    trace: Trace = {}
    for number in range(3):
        value = loss_of(step)
        value.backward()
        trace |= look(f"step {number}", model, batch, loss=value, weights=dict(model.state_dict()))
    for handle in handles:
        handle.remove()
    return trace


def under_other_hooks(step: Step) -> Trace:
    """The user's own saved-tensor hooks and anomaly detection around the whole step."""
    model, batch, _ = step
    with torch.autograd.graph.save_on_cpu(), torch.autograd.set_detect_anomaly(True):
        loss_of(step).backward()
    return look("after hooks", model, batch)


def call_functionally(step: Step) -> Trace:
    """torch.func.functional_call with other weights than the model's own."""
    model, batch, loss = step
    others = {name: (value * 0.5).requires_grad_() for name, value in model.named_parameters()}
    arguments = tuple(batch) if isinstance(batch, (tuple, list)) else () if isinstance(batch, dict) else (batch,)
    keywords: dict[str, Any] = batch if isinstance(batch, dict) else {}
    value = scalar_loss(torch.func.functional_call(model, others, arguments, keywords), loss)
    gradients = torch.autograd.grad(value, list(others.values()), allow_unused=True)
    return look("after the call", model, batch, loss=value, gradients=gradients)


def copy_in_between(step: Step) -> Trace:
    """A deep copy between steps trains on its own; the two do not touch each other."""
    model, batch, loss = step
    trace = trace_steps(step, num_steps=1)
    twin = copy.deepcopy(model), copy.deepcopy(batch), loss
    trace |= {f"copy's {path}": seen for path, seen in trace_steps(twin, num_steps=2).items()}
    return trace | {f"then {path}": seen for path, seen in trace_steps(step, num_steps=2).items()}


SCENARIOS: tuple[Scenario, ...] = (
    accumulate_gradients,
    forward_several_times_before_backward,
    sum_several_losses,
    backward_twice,
    differentiate_twice,
    differentiate_by_some,
    never_go_backward,
    go_backward_from_the_middle,
    evaluate_in_between,
    switch_modes,
    train_with_adam,
    step_inside_backward,
    under_other_hooks,
    call_functionally,
    copy_in_between,
)
