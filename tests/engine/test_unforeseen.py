"""What a plan did not foresee: other shapes, compiled losses, changed weights, other modes, another model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.plans import every_layer, every_value
from tests.engine.scenarios import assert_same_under, loss_of
from tests.engine.step_comparison import RUN_SEED, StepsDifferError, Trace, assert_same, call, look, trace_steps
from tests.engine.zoo import BY_NAME, Example
from tests.engine.zoo.example import Step, mean_of_squares, quiet_compilation
from tests.engine.zoo.mutation import ShiftedGeluBlock
from torch import Tensor, nn

import memfit

both_plans = pytest.mark.parametrize("plan_for", [every_layer, every_value], ids=lambda plan_for: plan_for.__name__)
PlanFor = Callable[[Example], memfit.Plan]


@pytest.mark.filterwarnings("ignore:planned for")
@both_plans
def test_batches_of_other_shapes_than_the_planned_one(plan_for: PlanFor) -> None:
    def scenario(step: Step) -> Trace:
        model, _, _ = step
        trace: Trace = {}
        for num_sequences, length in ((3, 5), (1, 9), (2, 7), (2, 1)):
            ids = torch.arange(num_sequences * length).view(num_sequences, length) % 29
            model.zero_grad()
            output = model(ids)
            output.square().mean().backward()
            trace |= look(f"{num_sequences}x{length}", model, output=output)
        return trace

    assert_same_under(BY_NAME["gpt"], plan_for, scenario)


@both_plans
def test_compiled_loss_outside_of_the_model_stays_compiled(plan_for: PlanFor) -> None:
    def scenario(step: Step) -> Trace:
        model, ids, _ = step
        torch.compiler.reset()
        num_calls = [0]

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                num_calls[0] += 1
                return graph(*args)

            return run

        loss = torch.compile(lambda logits: (logits.softmax(-1) * logits).mean(), backend=backend)
        with quiet_compilation():
            first = loss(model(ids))
        first.backward()
        second = loss(model(ids))
        second.backward()
        assert num_calls == [2]
        return look("after two", model, first=first, second=second)

    assert_same_under(BY_NAME["gpt"], plan_for, scenario)


def test_changed_parameter_between_forward_and_backward_is_named() -> None:
    example = BY_NAME["gpt"]
    step = example.build()
    with memfit.apply(step[0], every_layer(example)):
        loss = loss_of(step)
        with torch.no_grad():
            step[0].blocks[1].mlp[0].bias.add_(1)
        # Plain autograd does not need this bias and would not object; a replay of the block does.
        with pytest.raises(memfit.StaleValueError, match=r"blocks\.1\.mlp\.0\.bias"):
            loss.backward()
        step[0].zero_grad()
        assert_same_to_plain_after_change(example, step)


def assert_same_to_plain_after_change(example: Example, step: Step) -> None:
    """Check that the steps after a stale one are right, the model having kept the change."""
    plain = example.build()
    with torch.no_grad():
        plain[0].blocks[1].mlp[0].bias.add_(1)
    assert_same(trace_steps(plain), trace_steps(step))


def test_profile_and_plan_do_not_depend_on_each_others_models() -> None:
    example = BY_NAME["gpt"]
    plan = every_value(example)
    with pytest.raises(memfit.InvalidParameterError, match="another model"):
        memfit.apply(BY_NAME["resnet"].build()[0], plan)


def test_comparison_would_notice_a_wrong_replay() -> None:
    # The harness itself: a model whose weights differ in one bit is not the same.
    example = BY_NAME["gpt"]
    step = example.build()
    with torch.no_grad():
        weight = step[0].blocks[1].mlp[0].weight
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    with memfit.apply(step[0], every_layer(example)), pytest.raises(StepsDifferError):
        assert_same(trace_steps(example.build()), trace_steps(step))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_without_gradients_is_the_plain_one(mode: Callable[[], Any]) -> None:
    example = BY_NAME["gpt"]
    outputs: list[Tensor] = []
    for is_planned in (False, True):
        model, batch, _ = example.build()
        applied = memfit.apply(model, every_value(example)) if is_planned else None
        torch.manual_seed(RUN_SEED)
        with mode():
            outputs.append(call(model, batch))
        if applied is not None:
            applied.remove()
    assert torch.equal(*outputs)
    assert not outputs[1].requires_grad


class TakesGradientInside(nn.Module):
    """Uses torch.func.grad in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.func.grad(lambda y: torch.sin(self.inner(y)).sum())(x))


def test_torch_func_grad_inside_of_a_model_is_refused_by_torch_at_profile_and_leaves_the_model_as_it_was() -> None:
    # A known limit: torch.func.grad refuses to run under saved-tensor hooks, which is what a plan is made of. The
    # error must come before training, and come as torch wrote it.
    def build() -> Step:
        torch.manual_seed(RUN_SEED)
        return TakesGradientInside(), torch.randn(4, 6), mean_of_squares

    model, batch, loss = build()
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        memfit.profile(model, batch, loss=loss)
    assert_same(trace_steps(build()), trace_steps((model, batch, loss)))


@both_plans
def test_torch_func_grad_over_an_applied_model_runs_it_plainly(plan_for: PlanFor) -> None:
    def scenario(step: Step) -> Trace:
        model, batch, loss = step
        weights = {name: weight.detach() for name, weight in model.named_parameters()}

        def loss_at(weights: dict[str, Tensor], row: Tensor) -> Tensor:
            return loss(torch.func.functional_call(model, weights, (row[None],)))

        whole = torch.func.grad(lambda weights: loss_at(weights, batch.detach()[0]))(weights)
        by_row = torch.func.vmap(torch.func.grad(loss_at), (None, 0))(weights, batch.detach())
        return look("per row", model, whole=whole, by_row=by_row) | trace_steps(step)

    assert_same_under(BY_NAME["smooth-fp64"], plan_for, scenario)


def test_batch_overwritten_before_backward_is_an_error_that_describes_it() -> None:
    example = Example("shifted", shifted_blocks, has_blocks=True)
    step = example.build()
    loss = loss_of(step)
    step[1].zero_()
    # Plain autograd has saved nothing of the batch, so that it does not object. A replay would start from it.
    loss.backward()
    step = example.build()
    with memfit.apply(step[0], every_layer(example)):
        loss = loss_of(step)
        step[1].zero_()
        with pytest.raises(memfit.StaleValueError, match=r"a tensor of shape \(4, 7\) .* was changed between"):
            loss.backward()


def shifted_blocks() -> Step:
    """Return blocks that begin with a sum, for which autograd saves nothing."""
    return nn.Sequential(*(ShiftedGeluBlock() for _ in range(3))), torch.randn(4, 7), mean_of_squares
