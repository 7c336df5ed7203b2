"""That plans do what they say: backward really runs again the ops that a plan recomputes, each once, no others."""

from __future__ import annotations

import pytest
import torch
from tests.engine.plans import LAYER_PLANS, VALUE_PLANS, PlanFor, applied
from tests.engine.scenarios import loss_of
from tests.engine.step_comparison import RUN_SEED
from tests.engine.zoo import BY_NAME, ZOO, Example
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import memfit


def backward_flops(example: Example, plan: memfit.Plan | None) -> int:
    """Return the FLOPs of one backward pass by torch's own counter."""
    step = example.build()
    handle = applied(step[0], plan) if plan is not None else None
    if plan is not None:
        # After two passes it is clear which tape hears what was profiled.
        for _ in range(2):
            loss_of(step)
    torch.manual_seed(RUN_SEED)
    loss = loss_of(step)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    if handle is not None:
        handle.remove()
    return counter.get_total_flops()


@pytest.mark.parametrize("plan_for", LAYER_PLANS + VALUE_PLANS, ids=lambda plan_for: plan_for.__name__)
@pytest.mark.parametrize("name", ["gpt", "resnet", "unet", "mixture-of-experts", "transformers-llama"])
def test_backward_adds_exactly_the_planned_flops(name: str, plan_for: PlanFor) -> None:
    example = BY_NAME[name]
    plan = plan_for(example)
    assert backward_flops(example, plan) - backward_flops(example, None) == plan.recompute_flops


class CountsOps(TorchDispatchMode):
    """Counts the ops that run."""

    # Without this, torch.cond raises instead of reaching the mode.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.num_ops += 1
        return op(*args, **(kwargs or {}))


def num_backward_ops(example: Example, plan: memfit.Plan | None) -> int:
    """Return how many ops one backward pass runs."""
    step = example.build()
    handle = applied(step[0], plan) if plan is not None else None
    torch.manual_seed(RUN_SEED)
    with example.context():
        loss = loss_of(step)
    with CountsOps() as counter:
        loss.backward()
    if handle is not None:
        handle.remove()
    return counter.num_ops


# Nothing is saved inside of these models, or nothing but nested tensors, which are opaque.
NOTHING_TO_REPLAY = {"nothing-saved", "squares-in-loss", "jagged-batch"}


@pytest.mark.parametrize("example", ZOO, ids=str)
def test_recomputing_all_replays_something_in_every_model(example: Example) -> None:
    num_replayed = num_backward_ops(example, VALUE_PLANS[0](example)) - num_backward_ops(example, None)
    assert (num_replayed > 0) == (example.name not in NOTHING_TO_REPLAY)
