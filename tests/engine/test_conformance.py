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
    assert passes() == ["pass not as planned"] * 2
