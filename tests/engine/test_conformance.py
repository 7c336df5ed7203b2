"""Both engines do the same: what they record, drop, offload and replay, and how often they count each op.

The engine in Python receives ops here as the one in C++ does: under a dispatch mode torch would run a few others.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.engine.offloading_plans import mixed_plan
from tests.engine.plans import VALUE_PLANS, PlanFor, profile_of
from tests.engine.zoo import ZOO, Example
from torch import Tensor, nn

import memfit
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.graph.plan import Decision
from memfit.runtime.applying.apply import Applied
from memfit.runtime.applying.forward_wrapping import owners_of_wrappers
from memfit.runtime.engine.event_log import logged_events
from memfit.runtime.engine.forward_pass import ForwardPass
from memfit.runtime.engine.native_tape import new_tape
from memfit.runtime.engine.tape import Tape

TAPES: tuple[Callable[[], ForwardPass], ...] = (new_tape, Tape)


def offloading(example: Example) -> memfit.Plan:
    """Save, recompute and offload here and there."""
    return mixed_plan(profile_of(example), 1, 0)


def events_of(
    model: nn.Module, plan: memfit.Plan, tape: Callable[[], ForwardPass], step: Callable[[], object]
) -> list[str]:
    """Return what the engine does in two steps."""
    applied = Applied(model, plan, tape)
    try:
        with logged_events() as events:
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                step()
    finally:
        applied.remove()
    return events


def in_context(example: Example, step: TrainingStep) -> None:
    # Each step by itself: autocast keeps the casts of weights until its context ends.
    with example.context():
        step.run_forward_and_backward()


@pytest.mark.parametrize("plan_for", [*VALUE_PLANS, offloading], ids=lambda plan_for: plan_for.__name__)
@pytest.mark.parametrize("example", ZOO, ids=str)
def test_both_engines_record_drop_and_replay_the_same(example: Example, plan_for: PlanFor) -> None:
    plan = plan_for(example)
    logs = []
    for tape in TAPES:
        model, batch, loss = example.build()
        step = TrainingStep(model, StepArguments(batch, loss))
        torch.manual_seed(0)
        logs.append(events_of(model, plan, tape, lambda step=step: in_context(example, step)))
    assert logs[0] == logs[1]
    if Decision.RECOMPUTE in plan.decisions.values():
        assert any(event.startswith("record ") for event in logs[0])


class Branching(nn.Module):
    """Computes more in its block while ``is_long``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.is_long = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).exp().sin()
        if self.is_long:
            x = self.second(x).exp().tanh()
        return x.sum()


@pytest.mark.parametrize("tape", TAPES, ids=["C++", "Python"])
def test_a_branch_that_is_skipped_inside_a_block_is_not_as_planned(tape: Callable[[], ForwardPass]) -> None:
    torch.manual_seed(0)
    model, x = Branching(), torch.randn(2, 4)
    profile = memfit.profile(model, x)
    plan = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["*::aten.exp", "*::aten.tanh"])

    def passes() -> list[str]:
        events = events_of(model, plan, tape, lambda: model(x).backward())
        return [event for event in events if event.startswith("pass ")]

    assert passes() == ["pass as planned"] * 2
    model.is_long = False
    with pytest.warns(UserWarning, match="aten.exp ran 1 times outside of .* the plan expects 2") as warned:
        assert passes() == ["pass not as planned"] * 2
    assert len(warned) == 1


@pytest.mark.parametrize("tape", TAPES, ids=["C++", "Python"])
def test_fewer_calls_for_smaller_inputs_are_within_the_plan(tape: Callable[[], ForwardPass]) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.zeros(4)
            for row in x:
                state = (self.linear(row) + state).exp().tanh()
            return state.sum()

    torch.manual_seed(0)
    model, x = Loop(), torch.randn(3, 4)
    profile = memfit.profile(model, x)
    plan = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["*::aten.exp"])
    assert events_of(model, plan, tape, lambda: model(x[:2]).backward())[-1]
    with pytest.warns(UserWarning, match="planned") as warned:
        events_of(model, plan, tape, lambda: model(torch.randn(4, 4)).backward())
    # That the input is larger, and what follows from that.
    assert [str(each.message).partition(":")[0] for each in warned] == [
        "planned for x float32[3, 4], got float32[4, 4]",
        "a forward pass is not as planned",
    ]


def test_fit_and_verify_name_once_what_is_not_as_planned() -> None:
    class Aware(nn.Module):
        """Computes more where it is planned."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            for _ in range(4 if any(isinstance(owner, Applied) for owner in owners_of_wrappers(self)) else 3):
                x = x.exp().sin()
            return x.sum()

    torch.manual_seed(0)
    model, x = Aware(), torch.randn(64, 4)
    plan = memfit.plan(
        memfit.profile(model, x), strategy=memfit.NoCheckpointing(), force_recompute=["*::aten.exp", "*::aten.sin"]
    )
    with pytest.warns(UserWarning, match="not as planned") as warned:
        verification = memfit.verify(model, plan, x)
    assert len(warned) == 1
    assert verification.not_as_planned == "aten.exp ran 4 times outside of the model's parts, and the plan expects 3"
    budget = memfit.frontier(memfit.profile(model, x))[-1].peak_bytes
    with pytest.raises(memfit.InfeasibleBudgetError, match=r"because the planned step differs .*\(aten"):
        memfit.fit(model, x, budget=budget)
