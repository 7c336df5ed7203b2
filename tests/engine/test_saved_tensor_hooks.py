"""Which saves of a pass the engine in C++ is asked about: all at first, then those that mattered the last time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from tests.engine.plans import VALUE_PLANS, PlanFor
from tests.engine.zoo import ZOO, Example
from torch import Tensor, nn

import memfit
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.runtime.allocation_meter import allocated_peak
from memfit.runtime.engine.native_tape import NativeTape, new_tape
from memfit.runtime.engine.planned_modules import PlannedModule
from memfit.runtime.torch_internals import outer_saved_tensors_hooks

Forward = Callable[..., Any]


class Passes:
    """Forward passes in one planned that drops what ``exp`` makes."""

    def __init__(self, **planned: Any) -> None:
        self._module = PlannedModule("", nn.Identity(), {"aten.exp": True}, **planned)

    def run(self, forward: Forward, *args: Any) -> Any:
        tape = new_tape()
        assert isinstance(tape, NativeTape)
        try:
            return tape.run(self._module, forward, args, {})
        finally:
            tape.close()
            assert outer_saved_tensors_hooks() is None


@pytest.fixture
def passes() -> Passes:
    return Passes()


@pytest.fixture
def x() -> Tensor:
    return torch.tensor([0.5, -1.0], requires_grad=True)


def is_watched(result: Tensor, name: str = "self") -> bool:
    """Return whether we were asked about what was saved for the op that made ``result``."""
    return getattr(result.grad_fn, f"_raw_saved_{name}").unpack_hook is not None


def chain(x: Tensor) -> tuple[Tensor, ...]:
    """Two ops that save nothing dropped, one that makes something dropped, one that saves it, and two more."""
    first = x.sin()
    second = first.cos()
    dropped = second.exp()
    reader = dropped.tanh() * dropped
    last = reader.sin()
    return first, second, dropped, reader, last, last.cos()


def watched_in(passes: Passes, x: Tensor) -> list[bool]:
    first, second, dropped, reader, last, very_last = passes.run(chain, x)
    watched = [is_watched(dropped, "result"), *map(is_watched, (first, second, reader, last, very_last))]
    very_last.sum().backward()
    return watched


ALL = [True] * 6
# `exp`, for which its result is saved, and the product.
THE_DROPPED = [True, False, False, True, False, False]


def test_only_what_is_dropped_is_asked_about_from_the_second_pass_on(passes: Passes, x: Tensor) -> None:
    assert watched_in(passes, x) == ALL
    gradient, x.grad = x.grad, None
    for _ in range(2):
        assert watched_in(passes, x) == THE_DROPPED
        assert torch.equal(x.grad, gradient)
        x.grad = None


def test_another_region_knows_nothing_of_it(passes: Passes, x: Tensor) -> None:
    watched_in(passes, x)
    assert watched_in(Passes(), x) == ALL


def test_where_nothing_is_dropped_nothing_is_asked_about(x: Tensor) -> None:
    passes = Passes(records=False)
    assert is_watched(passes.run(torch.sin, x))
    assert not is_watched(passes.run(torch.sin, x))


def test_from_another_call_on_all_is_asked_about_and_known_the_next_time(passes: Passes, x: Tensor) -> None:
    def three(x: Tensor, middle: Callable[[Tensor], Tensor]) -> list[bool]:
        first = x.sin()
        second = middle(first)
        last = second.exp().sin().cos()
        return [is_watched(first), is_watched(second), is_watched(last)]

    for _ in range(2):
        watched = passes.run(three, x, torch.cos)
    assert watched == [False, False, False]
    assert passes.run(three, x, torch.square) == [False, False, True]
    # What was saved for the new call was not looked at, because the call was recorded only then: the next time it is.
    assert passes.run(three, x, torch.square) == [False, True, False]


def test_passes_that_end_sooner_or_go_on_longer(passes: Passes, x: Tensor) -> None:
    watched_in(passes, x)
    first = passes.run(torch.sin, x)
    assert not is_watched(first)

    def longer(x: Tensor) -> tuple[Tensor, Tensor]:
        end = chain(x)[-1].tan()
        return end, end.exp()

    for expected in (True, False):
        end, dropped = passes.run(longer, x)
        assert is_watched(end, "result") is expected
        assert is_watched(dropped, "result")


def test_what_requires_gradients_may_change(passes: Passes, x: Tensor) -> None:
    weights = [torch.tensor([2.0, 3.0]) for _ in range(3)]

    def scaled(x: Tensor) -> list[Tensor]:
        # The factor is saved only for the weight's gradient.
        return [x.exp() * weight for weight in weights]

    for _ in range(2):
        results = passes.run(scaled, x)
    assert all(result.grad_fn._saved_self is None for result in results)
    for weight in weights:
        weight.requires_grad_()
    results = passes.run(scaled, x)
    # In the first, what is saved is the output of the call just recorded, which was hooked for `exp` itself.
    assert [is_watched(result) for result in results] == [True, True, True]
    for _ in range(2):
        results = passes.run(scaled, x)
        assert [is_watched(result) for result in results] == [True, True, True]


def test_hooks_of_others_are_asked_and_not_ours(passes: Passes, x: Tensor) -> None:
    asked: list[Tensor] = []

    def packed(tensor: Tensor) -> Tensor:
        asked.append(tensor)
        return tensor

    def with_hooks(x: Tensor) -> tuple[Tensor, ...]:
        before = x.sin()
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
            dropped = before.exp()
            inside = dropped * before.cos()
        return inside, dropped.tanh() * dropped, before.cos()

    for _ in range(3):
        inside, after, last = passes.run(with_hooks, x)
        # What `exp` made, twice, what `cos` reads and what it made.
        assert len(asked) == 4
        asked.clear()
        assert is_watched(after, "other")
        (inside + after + last).sum().backward()


def test_what_others_were_asked_about_may_come_to_us(passes: Passes, x: Tensor) -> None:
    def forward(x: Tensor, hooks: AbstractContextManager[object]) -> Tensor:
        dropped = x.exp()
        with hooks:
            x.sin()
            return dropped.cos()

    passes.run(forward, x, torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach))
    assert is_watched(passes.run(forward, x, nullcontext()))


def test_others_may_come_where_there_were_none(passes: Passes, x: Tensor) -> None:
    asked: list[Tensor] = []

    def packed(tensor: Tensor) -> Tensor:
        asked.append(tensor)
        return tensor

    for _ in range(2):
        passes.run(chain, x)

    def all_in_hooks(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
            return chain(x)

    passes.run(all_in_hooks, x)
    # sin, cos, exp, tanh and its factors, sin, cos.
    assert len(asked) == 8


def test_where_hooks_are_forbidden_none_are_put(passes: Passes, x: Tensor) -> None:
    class Forbidding:
        """From the second pass on, where ours are not there: torch refuses to forbid hooks that are."""

        is_on = False

        def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first = x.sin()
            if not self.is_on:
                return first, first.exp()
            with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
                return first, first.exp()

    forward = Forbidding()
    passes.run(forward, x)
    forward.is_on = True
    first, dropped = passes.run(forward, x)
    assert not is_watched(dropped, "result")
    forward.is_on = False
    first, dropped = passes.run(forward, x)
    assert [is_watched(first), is_watched(dropped, "result")] == [False, True]


def test_a_backward_pass_within_the_forward_pass(passes: Passes, x: Tensor) -> None:
    def with_forces(x: Tensor) -> tuple[Tensor, Tensor]:
        dropped = x.exp()
        (force,) = torch.autograd.grad(x.sin().cos().sum(), x, create_graph=True)
        # Saved before anything is recorded after that pass.
        return dropped.sin(), force.sin()

    gradients = []
    for _ in range(3):
        reader, force = passes.run(with_forces, x)
        assert is_watched(reader)
        (gradient,) = torch.autograd.grad((reader + force).sum(), x)
        gradients.append(gradient)
    for gradient in gradients[1:]:
        assert torch.equal(gradient, gradients[0])


def test_a_pass_that_fails_takes_the_hooks_along(passes: Passes, x: Tensor) -> None:
    def failing(x: Tensor) -> Tensor:
        chain(x)
        raise ValueError("no")

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            passes.run(failing, x)
    assert watched_in(passes, x) == THE_DROPPED


def _step_of(example: Example) -> tuple[nn.Module, StepArguments]:
    model, batch, loss = example.build()
    return model, StepArguments(batch, loss)


def peaks_of_steps(example: Example, plan: memfit.Plan, *, is_always_new: bool) -> list[int]:
    """Return the peaks of a few steps by ``plan``; where it is always new, nothing is known of the step before."""
    model, arguments = _step_of(example)
    step = TrainingStep(model, arguments)
    applied: memfit.Applied | None = None
    peaks = []
    for _ in range(3):
        if applied is None:
            applied = memfit.apply(model, plan)
        with example.context():
            peaks.append(allocated_peak(step.run_forward_and_backward, torch.device("cpu")))
        model.zero_grad(set_to_none=True)
        if is_always_new:
            applied = applied.remove()
    return peaks


@pytest.mark.parametrize("plan_for", VALUE_PLANS, ids=lambda plan_for: plan_for.__name__)
@pytest.mark.parametrize("example", ZOO, ids=str)
@pytest.mark.filterwarnings("ignore:the plan saves every value")
def test_every_step_takes_as_much_as_if_all_were_asked_about(example: Example, plan_for: PlanFor) -> None:
    plan = plan_for(example)
    model, arguments = _step_of(example)
    with memfit.apply(model, plan), example.context():
        # A process keeps what it compiles for its first call.
        TrainingStep(model, arguments).run_forward_and_backward()
    as_known = peaks_of_steps(example, plan, is_always_new=False)
    assert as_known == peaks_of_steps(example, plan, is_always_new=True)
