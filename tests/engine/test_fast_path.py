"""The way into a planned in C++: taken while a pass of the same model is under way, and by everybody else not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.runtime.applying.forward_wrapping import Forward, Runner
from memfit.runtime.engine.native_tape import NativeTape, fast_path_into, new_tape
from memfit.runtime.engine.planned_modules import PlannedModule
from memfit.runtime.engine.tape import Tape
from memfit.runtime.torch_internals import outer_saved_tensors_hooks


class Owner:
    """A model's passes, and the longer way into a planned of it, which notes when it is taken."""

    def __init__(self) -> None:
        self.num_longer = 0
        self.planned = PlannedModule("block", nn.Identity(), {"aten.exp": True})
        self.runner: Runner = fast_path_into(self.planned, self, self._slow_path)

    def _slow_path(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_longer += 1
        return forward(*args, **kwargs)


@pytest.fixture
def owner() -> Owner:
    return Owner()


def begun(owner: Owner) -> NativeTape:
    tape = new_tape()
    assert isinstance(tape, NativeTape)
    tape.begin(owner)
    return tape


def has_hooks() -> bool:
    return outer_saved_tensors_hooks() is not None


def test_it_is_the_shortest_while_a_pass_is_under_way(owner: Owner) -> None:
    x = torch.tensor([0.5], requires_grad=True)
    tape = begun(owner)
    arguments: list[Any] = []

    def forward(value: Tensor, *, factor: float) -> Tensor:
        arguments.extend((value, factor, has_hooks()))
        return value.exp() * factor

    result = owner.runner(forward, (x,), {"factor": 3.0})
    assert arguments == [x, 3.0, True]
    assert not has_hooks()
    tape.close()
    result.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 3.0 * x.detach().exp())
    assert owner.num_longer == 0


def with_nobody_at_work(run: Callable[[], object], owner: Owner) -> None:
    run()


def after_the_pass(run: Callable[[], object], owner: Owner) -> None:
    begun(owner).close()
    run()


def after_a_pass_that_nobody_closed(run: Callable[[], object], owner: Owner) -> None:
    begun(owner)
    run()


def in_another_models_pass(run: Callable[[], object], owner: Owner) -> None:
    around, inside = begun(owner), begun(Owner())
    run()
    inside.close()
    around.close()


def after_passes_that_ended_in_no_order(run: Callable[[], object], owner: Owner) -> None:
    around, inside = begun(owner), begun(Owner())
    around.close()
    inside.close()
    run()


def under_a_tape_in_python(run: Callable[[], object], owner: Owner) -> None:
    tape = Tape()
    tape.begin(owner)
    run()
    tape.close()


def without_gradients(run: Callable[[], object], owner: Owner) -> None:
    tape = begun(owner)
    with torch.no_grad():
        run()
    tape.close()


def in_a_transform(run: Callable[[], object], owner: Owner) -> None:
    tape = begun(owner)

    def mapped(x: Tensor) -> Tensor:
        run()
        return x

    torch.func.vmap(mapped)(torch.ones(2))
    tape.close()


@pytest.mark.parametrize(
    "situation",
    [
        with_nobody_at_work,
        after_the_pass,
        after_a_pass_that_nobody_closed,
        in_another_models_pass,
        after_passes_that_ended_in_no_order,
        under_a_tape_in_python,
        without_gradients,
        in_a_transform,
    ],
)
def test_it_is_the_longer_one(situation: Callable[[Callable[[], object], Owner], None], owner: Owner) -> None:
    hooked: list[bool] = []
    situation(lambda: owner.runner(lambda: hooked.append(has_hooks()), (), {}), owner)
    assert owner.num_longer == 1
    assert hooked == [False]


def test_after_another_models_pass_it_is_the_shortest_again(owner: Owner) -> None:
    tape = begun(owner)
    begun(Owner()).close()
    assert owner.runner(has_hooks, (), {})
    assert owner.num_longer == 0
    tape.close()


def test_what_is_raised_inside_comes_out_and_leaves_nothing_behind(owner: Owner) -> None:
    tape = begun(owner)

    def fail() -> None:
        assert has_hooks()
        raise KeyboardInterrupt("from within")

    with pytest.raises(KeyboardInterrupt, match="from within"):
        owner.runner(fail, (), {})
    assert not has_hooks()
    assert owner.runner(has_hooks, (), {})
    tape.close()


def test_hooks_that_are_in_force_have_the_say(owner: Owner) -> None:
    tape = begun(owner)
    seen: list[Tensor] = []

    def noted(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        owner.runner(x.exp, (), {})
    assert len(seen) == 1
    tape.close()


def test_without_an_engine_in_cpp_there_is_only_the_longer_one(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.runtime.native.native_library.configured_module", lambda: None)

    def slow_path(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(*args, **kwargs)

    assert fast_path_into(owner.planned, owner, slow_path) is slow_path


def test_a_plan_that_was_removed_is_not_kept_by_its_ways() -> None:
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
