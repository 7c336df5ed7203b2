"""An applied model is still the user's model: its keys, type, hooks, copies, pickles and signature are as before."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.plans import every_layer, every_value
from tests.engine.scenarios import assert_same_under, loss_of
from tests.engine.step_comparison import RUN_SEED, Trace, assert_same, look, trace_steps
from tests.engine.zoo import BY_NAME, Example
from tests.engine.zoo.example import Step
from torch import nn

import memfit

NAMES = ("gpt", "resnet", "mixture-of-experts", "transformers-gpt2")
both_plans = pytest.mark.parametrize("plan_for", [every_layer, every_value], ids=lambda plan_for: plan_for.__name__)
PlanFor = Callable[[Example], memfit.Plan]


def anatomy(model: nn.Module) -> dict[str, Any]:
    """Return what can be told of every module without running it, down to its attributes and hooks."""
    return {
        path: (
            type(module),
            {name: id(value) for name, value in vars(module).items()},
            {name: list(value) for name, value in vars(module).items() if "_hooks" in name and value},
            getattr(module.forward, "__func__", module.forward),
        )
        for path, module in model.named_modules()
    }


@both_plans
@pytest.mark.parametrize("name", NAMES)
def test_remove_leaves_no_trace_on_the_model(name: str, plan_for: PlanFor) -> None:
    example = BY_NAME[name]
    step = example.build()
    before = anatomy(step[0])
    applied = memfit.apply(step[0], plan_for(example))
    assert anatomy(step[0]) != before
    applied.remove()
    assert anatomy(step[0]) == before
    assert_same(trace_steps(example.build()), trace_steps(step))


@both_plans
@pytest.mark.parametrize("name", NAMES)
def test_keys_types_and_signature_stay_while_applied(name: str, plan_for: PlanFor) -> None:
    example = BY_NAME[name]
    plain, (model, _, _) = example.build()[0], example.build()
    with memfit.apply(model, plan_for(example)):
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
        assert [path for path, _ in model.named_modules()] == [path for path, _ in plain.named_modules()]
        assert inspect.signature(model.forward) == inspect.signature(plain.forward)
        assert repr(model) == repr(plain)
        plain.load_state_dict(model.state_dict(), strict=True)
        model.load_state_dict(plain.state_dict(), strict=True)


def test_leaving_the_context_removes_the_plan_even_by_an_exception() -> None:
    example = BY_NAME["gpt"]
    model, _, _ = example.build()
    before = anatomy(model)
    with pytest.raises(KeyError, match="user's mistake"), memfit.apply(model, every_layer(example)):
        raise KeyError("user's mistake")
    assert anatomy(model) == before


@both_plans
@pytest.mark.parametrize("name", ["gpt", "resnet", "in-place-residuals"])
def test_backward_after_the_plan_was_removed(name: str, plan_for: PlanFor) -> None:
    example = BY_NAME[name]
    plan = plan_for(example)
    traces = []
    for is_planned in (False, True):
        step = example.build()
        model, batch, _ = step
        torch.manual_seed(RUN_SEED)
        applied = memfit.apply(model, plan) if is_planned else None
        loss = loss_of(step)
        if applied is not None:
            applied.remove()
        loss.backward()
        traces.append(look("after removal", model, batch))
    assert_same(*traces)


@both_plans
def test_plan_applied_between_forward_and_backward(plan_for: PlanFor) -> None:
    example = BY_NAME["gpt"]
    plan = plan_for(example)

    def scenario(step: Step, is_planned: bool) -> Trace:
        torch.manual_seed(RUN_SEED)
        early = loss_of(step)
        applied = memfit.apply(step[0], plan) if is_planned else None
        late = loss_of(step)
        early.backward()
        late.backward()
        if applied is not None:
            applied.remove()
        return look("after both", step[0])

    assert_same(scenario(example.build(), False), scenario(example.build(), True))


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@both_plans
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved_and_loaded], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_of_an_applied_model_trains_on_its_own(
    name: str, duplicate: Callable[[nn.Module], nn.Module], plan_for: PlanFor
) -> None:
    example = BY_NAME[name]
    plain = trace_steps(example.build())
    model, batch, loss = example.build()
    applied = memfit.apply(model, plan_for(example))
    twin = duplicate(model)
    assert not {id(tensor) for tensor in twin.parameters()} & {id(tensor) for tensor in model.parameters()}
    assert_same(plain, trace_steps((twin, copy.deepcopy(batch), loss)))
    # Training the copy has not touched the original, nor does removing the original's plan touch the copy.
    assert_same(plain, trace_steps((model, batch, loss)))
    applied.remove()
    again = duplicate(twin)
    assert_same(*(trace_steps((each, example.build()[1], loss), num_steps=1) for each in (twin, again)))


def hooked(model: nn.Module) -> list[str]:
    """Register hooks of every kind on each module and return the log that they write."""
    log: list[str] = []

    def written(kind: str, path: str) -> Callable[..., None]:
        def write(*arguments: Any, **_: Any) -> None:
            # The first argument is the module; what comes after says how the hook was called.
            log.append(f"{kind} {path} {len(arguments)}")

        return write

    for path, module in model.named_modules():
        module.register_forward_pre_hook(written("before", path))
        module.register_forward_hook(written("after", path), with_kwargs=True)
        module.register_forward_hook(written("always after", path), always_call=True)
        # The second of a list of blocks: unlike the first, its inputs always require gradients.
        if path.rpartition(".")[2] == "1":
            module.register_full_backward_pre_hook(written("before backward", path))
            module.register_full_backward_hook(written("after backward", path))
    return log


@both_plans
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["gpt", "mixture-of-experts", "transformers-gpt2"])
def test_user_hooks_are_called_as_ever(name: str, when: str, plan_for: PlanFor) -> None:
    example = BY_NAME[name]
    plan = plan_for(example)
    plain = example.build()
    plain_log = hooked(plain[0])
    expected = trace_steps(plain)
    planned = example.build()
    log = hooked(planned[0]) if when == "before" else []
    with memfit.apply(planned[0], plan):
        log = hooked(planned[0]) if when == "after" else log
        assert_same(expected, trace_steps(planned))
    assert len(log) > 0
    assert log == plain_log


@both_plans
def test_hooks_that_change_what_passes_through_are_obeyed(plan_for: PlanFor) -> None:
    def scenario(step: Step) -> Trace:
        model = step[0]
        handles = [
            model.blocks[0].register_forward_hook(lambda module, inputs, output: output * 1.5),
            model.blocks[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,)),
            model.blocks[1].mlp.register_forward_hook(lambda module, inputs, output: output.mul_(2)),
            model.blocks[2].register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,)),
        ]
        trace = trace_steps(step, num_steps=2)
        for handle in handles:
            handle.remove()
        return trace | {f"without hooks {path}": seen for path, seen in trace_steps(step, num_steps=2).items()}

    assert_same_under(BY_NAME["gpt"], plan_for, scenario)


def test_a_plan_that_was_removed_is_freed() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 1)), torch.ones(2, 3)
    profile = memfit.profile(model, x, loss=torch.Tensor.sum)
    plan = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["*::aten.gelu"])
    assert plan.recorded_modules
    applied = memfit.apply(model, plan)
    model(x).sum().backward()
    removed = weakref.ref(applied)
    applied.remove()
    del applied
    assert removed() is None
