"""Where torch.utils.checkpoint gives another result than the plain step, and memfit the same.

Checkpoint runs a block's Python again in the backward pass, so that it sees changed arguments and does every side
effect twice. It mostly does so without a word: these tests would fail if a later torch release changed that, and
the claim should then be taken back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from tests.engine.plans import applied, every_layer, every_value
from tests.engine.step_comparison import StepsDifferError, Trace, assert_same, trace_steps
from tests.engine.zoo import BY_NAME, Example
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import memfit


@dataclass(frozen=True)
class Break:
    """A model of the zoo that checkpoint gets wrong, and what comes out of it."""

    example: str
    first_difference: str
    training: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.example


SILENT = (
    Break("keyword-mutated-after-use", "step 0, gradient of blocks.0.linear.weight: 49 of 49 numbers differ"),
    Break("list-mutated-between-blocks", "step 0, gradient of blocks.0.linear.weight: 49 of 49 numbers differ"),
    Break("closure-mutated-after-use", "step 0, gradient of blocks.0.linear.weight: 49 of 49 numbers differ"),
    Break("moving-average", "step 0, gradient of 0.linear.weight: 49 of 49 numbers differ"),
    Break("own-generator", "step 0, gradient of 0.linear.weight: 36 of 36 numbers differ"),
    # Checkpoint stops its second run as soon as it has the last saved tensor, before the kernel has filled it.
    Break("rrelu-last-in-block", "step 0, gradient of 0.0.weight: 36 of 36 numbers differ"),
    Break("resnet", "step 0, buffer blocks.0.norm1.running_mean: 6 of 6 numbers differ"),
    Break("spectral-norm", r"step 0, gradient of 0.0.bias: \d of 6 numbers differ"),
    Break("activation-log", "step 0, attribute 0.num_calls: expected 1, got 2"),
    # Counters only: in eval mode the router's bias stays, so that the second run takes the same way.
    Break("mixture-of-experts", "step 0, attribute 0.num_expert_calls: expected 4, got 8", training=False),
    Break(
        "gpt",
        "step 0, gradient of tokens.weight: 117 of 348 numbers differ",
        options={"preserve_rng_state": False},
    ),
)
LOUD = (
    Break("mixture-of-experts", "different metadata"),
    Break("growing-cache", "different metadata"),
    Break("preallocated-cache", "different metadata"),
)


def checkpointed_trace(example: Example, training: bool, options: dict[str, Any]) -> Trace:
    """Return what the model does with torch.utils.checkpoint on each of its blocks."""
    model, batch, loss = example.build()
    blocks: nn.Module = getattr(model, "blocks", model)
    for block in blocks.children():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    return trace_steps((model, batch, loss), training=training)


def assert_memfit_is_right(example: Example, training: bool, plain: Trace) -> None:
    """Run the same blocks recomputed by memfit, and then all that it can recompute."""
    for plan_for in (every_layer, every_value) if example.has_blocks else (every_value,):
        model, batch, loss = example.build()
        with applied(model, plan_for(example)):
            assert_same(plain, trace_steps((model, batch, loss), training=training))


@pytest.mark.parametrize("case", SILENT, ids=str)
def test_checkpoint_is_silently_wrong_and_memfit_right(case: Break) -> None:
    example = BY_NAME[case.example]
    plain = trace_steps(example.build(), training=case.training)
    with pytest.raises(StepsDifferError, match=case.first_difference):
        assert_same(plain, checkpointed_trace(example, case.training, case.options))
    assert_memfit_is_right(example, case.training, plain)


@pytest.mark.parametrize("case", LOUD, ids=str)
def test_checkpoint_raises_and_memfit_is_right(case: Break) -> None:
    example = BY_NAME[case.example]
    plain = trace_steps(example.build(), training=case.training)
    with pytest.raises(CheckpointError, match=case.first_difference):
        checkpointed_trace(example, case.training, case.options)
    assert_memfit_is_right(example, case.training, plain)


@pytest.mark.parametrize("name", ["in-place-residuals", "twenty-layers"])
def test_checkpoint_cannot_change_a_blocks_output_in_place_and_memfit_can(name: str) -> None:
    example = BY_NAME[name]
    plain = trace_steps(example.build())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        checkpointed_trace(example, True, {})
    assert_memfit_is_right(example, True, plain)


def test_batch_norm_counts_a_step_twice_under_checkpoint_and_once_under_memfit() -> None:
    example = BY_NAME["resnet"]
    counts = {}
    for name, trace in {
        "plain": trace_steps(example.build()),
        "checkpoint": checkpointed_trace(example, True, {}),
        "memfit": planned(example),
    }.items():
        counts[name] = trace["step 2, buffer blocks.1.norm1.num_batches_tracked"].numbers.item()
    assert counts == {"plain": 3, "checkpoint": 6, "memfit": 3}


def planned(example: Example) -> Trace:
    """Return what the model does with each of its blocks recomputed by memfit."""
    model, batch, loss = example.build()
    with memfit.apply(model, every_layer(example)):
        return trace_steps((model, batch, loss))
