"""Under autocast the bf16 copies of fp32 weights are dropped after forward and cast again in backward."""

from __future__ import annotations

from typing import Any

import torch
from tests.engine.plans import every_layer, every_value, profile_of
from tests.engine.scenarios import loss_of
from tests.engine.step_comparison import assert_same, trace_steps
from tests.engine.zoo import BY_NAME
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit.capture.state.kept_state import KeptState
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep

GPT = BY_NAME["gpt-autocast"]
# Four linear layers in each of three blocks, and the head. Their biases are cast too, but autograd keeps none.
NUM_LINEAR_WEIGHTS = 13


class WeightCopies(TorchDispatchMode):
    """Watches the copies that are made of a model's parameters in another type."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.addresses = {parameter.data_ptr() for parameter in model.parameters()}
        self.copies: list[StorageWeakRef] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if op is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.addresses:
            self.copies.append(StorageWeakRef(result.untyped_storage()))
        return result

    def num_alive(self) -> int:
        """Return how many of the copies something still holds."""
        return sum(not copy.expired() for copy in self.copies)


def copies_alive_after_forward(plan: memfit.Plan | None) -> int:
    """Run forward under autocast, leave it (it caches copies while it lasts), and count what autograd holds."""
    step = GPT.build()
    applied = memfit.apply(step[0], plan) if plan is not None else None
    with WeightCopies(step[0]) as copies, GPT.context():
        loss = loss_of(step)
    num_alive = copies.num_alive()
    loss.backward()
    if applied is not None:
        applied.remove()
    return num_alive


def test_plain_autocast_holds_a_copy_of_every_linear_weight() -> None:
    assert copies_alive_after_forward(None) == NUM_LINEAR_WEIGHTS


def test_recomputed_blocks_hold_none_of_their_copies() -> None:
    # The head is in no block and keeps its copy.
    assert copies_alive_after_forward(every_layer(GPT)) == 1


def test_recomputing_everything_holds_no_copy() -> None:
    assert copies_alive_after_forward(every_value(GPT)) == 0


def test_casts_alone_can_be_recomputed() -> None:
    plan = memfit.plan(profile_of(GPT), strategy=memfit.NoCheckpointing(), force_recompute=["*::aten._to_copy"])
    assert copies_alive_after_forward(plan) == 0
    step = GPT.build()
    with memfit.apply(step[0], plan):
        planned = trace_steps(step, context=GPT.context)
    assert_same(trace_steps(GPT.build(), context=GPT.context), planned)


def test_profiling_lets_every_copy_go() -> None:
    model, batch, loss = GPT.build()
    step = TrainingStep(model, StepArguments(batch, loss))
    state = KeptState(step)
    with WeightCopies(model) as copies:
        # The first run looks for leaves whose gradients are to be kept; a copy looks like one when backward reads it.
        with state.kept(), GPT.context():
            step.run()
        torch.clear_autocast_cache()
    assert len(copies.copies) >= NUM_LINEAR_WEIGHTS
    assert copies.num_alive() == 0
