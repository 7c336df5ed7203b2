"""What replays in one kernel take: the bytes of what is kept, and nothing of what is only passed on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.pointwise_chains import norm, numbers
from tests.engine.zoo import ZOO, Example
from torch import Tensor, nn

import memfit
from memfit.capture import real_step
from memfit.capture.measuring import fused_costs
from memfit.capture.measuring.fused_costs import with_fused_replays
from memfit.capture.recording import recorder
from memfit.capture.recording.op_facts import fused_facts_of
from memfit.capture.recording.step_recording import FusedFacts, OpFacts
from memfit.graph.model_profile import Phase, RecordedOp, RecordedValue, Replay, Save
from memfit.runtime.engine.op_rules import op_name, rule_for
from memfit.runtime.fusing.pointwise_ops import can_be_fused

RATE = 10.0


def op(inputs: tuple[int, ...], output: int, seconds: float = 100.0, phase: Phase = Phase.FORWARD) -> RecordedOp:
    return RecordedOp("", "aten.mul", 0, inputs, (output,), (), 0, Replay.YES, phase, seconds)


def value(index: int, op_index: int | None, *, is_saved: bool = False) -> RecordedValue:
    return RecordedValue(f"v{index}", 8, op_index, index, saves=(Save(9, 9),) if is_saved else ())


def fact(*reads: tuple[int | None, int], made_bytes: int = 8, gains_alone: bool = False, fuses: bool = True) -> OpFacts:
    return OpFacts(None, 0, 0, None, fused=FusedFacts(reads, made_bytes, gains_alone) if fuses else None)


def replays(*steps: tuple[RecordedOp, OpFacts], values: list[RecordedValue]) -> list[float | None]:
    ops, facts = zip(*steps, strict=True)
    return [op.replay_seconds for op in with_fused_replays(ops, facts, values, RATE)]


def test_what_is_only_passed_on_costs_nothing() -> None:
    values = [value(0, None), value(1, 0), value(2, 1), value(3, 2, is_saved=True)]
    chain = [(op((i,), i + 1), fact((i, 8))) for i in range(3)]
    assert replays(*chain, values=values) == [0.8, 0.0, 0.8]


def test_what_autograd_saves_is_written_and_may_have_to_be_read() -> None:
    values = [value(0, None), value(1, 0, is_saved=True), value(2, 1, is_saved=True)]
    chain = [(op((i,), i + 1), fact((i, 8))) for i in range(2)]
    assert replays(*chain, values=values) == [1.6, 1.6]


def test_what_another_op_reads_is_written() -> None:
    values = [value(0, None), value(1, 0), value(2, 1), value(3, 2)]
    steps = [
        (op((0,), 1), fact((0, 8))),
        (op((1,), 2), fact((1, 8))),
        (op((1,), 3), fact(fuses=False)),
    ]
    assert replays(*steps, values=values) == [1.6, 1.6, None]


def test_an_op_without_neighbours_is_replayed_by_torch_unless_a_kernel_is_faster() -> None:
    values = [value(0, None), value(1, 0, is_saved=True)]
    assert replays((op((0,), 1), fact((0, 8))), values=values) == [None]
    assert replays((op((0,), 1), fact((0, 8), gains_alone=True)), values=values) == [1.6]


def test_no_op_takes_longer_than_by_itself() -> None:
    values = [value(0, None), value(1, 0, is_saved=True)]
    assert replays((op((0,), 1, seconds=0.5), fact((0, 8), gains_alone=True)), values=values) == [0.5]


def test_ops_of_the_backward_pass_are_not_replayed() -> None:
    values = [value(0, None), value(1, 0, is_saved=True)]
    backward = op((0,), 1, phase=Phase.BACKWARD)
    assert replays((backward, fact((0, 8), gains_alone=True)), values=values) == [None]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(64, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        return norm(x.exp(), self.weight).float().square().sum()


def pretend_to_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recorder, real_step):
        monkeypatch.setattr(module, "fuses_on", lambda _device: True)
    monkeypatch.setattr(real_step, "copied_bytes_per_second", lambda _device: 1e12)


def profiled() -> memfit.ModelProfile:
    return memfit.profile(Norm(), numbers(8, 64).requires_grad_())


def test_profiles_tell_what_replays_take_where_ops_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_fuse(monkeypatch)
    profile = profiled()
    replayed = {f"{op.op}#{op.call}": op.replay_seconds for op in profile.ops if op.replay_seconds is not None}
    elements = 8 * 64
    # Read and widened; times the scale, passed on; narrowed; times the weight, passed on; and widened for the loss.
    expected = {
        "aten._to_copy#0": (2 + 4) * elements,
        "aten.mul#0": 4 * elements + 4 * 8,
        "aten._to_copy#1": 2 * elements,
        "aten.mul#1": 2 * 64 + 2 * elements,
        "aten._to_copy#2": 4 * elements,
    }
    assert replayed == pytest.approx({name: num_bytes / 1e12 for name, num_bytes in expected.items()})
    again = fused_costs.with_fused_replays(profile.ops, [fact(fuses=False)] * len(profile.ops), profile.values, 1e12)
    assert again == profile.ops


@pytest.mark.parametrize("example", ZOO, ids=str)
def test_any_model_can_be_profiled_where_ops_are_fused(monkeypatch: pytest.MonkeyPatch, example: Example) -> None:
    pretend_to_fuse(monkeypatch)
    model, batch, loss = example.build()
    with example.context():
        profile = memfit.profile(model, batch, loss=loss)
    assert all(op.replay_seconds is None or 0 <= op.replay_seconds <= op.seconds for op in profile.ops)


def test_ops_that_return_nothing_are_not_fused() -> None:
    op = torch.ops.aten._assert_async.default
    assert fused_facts_of(op, rule_for(op), (torch.ones(1),), {}, [], [0]) is None


def test_profiles_tell_nothing_of_it_where_they_are_not() -> None:
    assert all(op.replay_seconds is None for op in profiled().ops)


def test_plans_count_with_what_replays_take(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_fuse(monkeypatch)
    # Without what the engine itself costs.
    profile = replace(profiled(), host=None)
    plan = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["*::aten._to_copy", "*::aten.mul"])
    replayed = sum(op.replay_seconds or 0.0 for op in profile.ops if op.module == "" and op.replay_seconds is not None)
    assert plan.predicted_overhead == pytest.approx(replayed / profile.step_seconds)


X = numbers(8, 16)
ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("expected", "call", "args", "kwargs"),
    [
        (True, ATEN.mul.Tensor, (X, X), {}),
        (True, ATEN.mul.Tensor, (X, X[0]), {}),
        (True, ATEN.mul.Tensor, (X, X[:, :1].float()), {}),
        (True, ATEN.add.Tensor, (X, numbers(8, 32)[:, :16]), {}),
        (True, ATEN._to_copy.default, (X,), {"dtype": torch.float32}),
        (True, ATEN.silu.default, (X,), {}),
        (True, ATEN.mul.Tensor, (X.float(), X.float()), {}),
        (False, ATEN.mul.Tensor, (X.double(), X.double()), {}),
        (False, ATEN.silu.default, (X.float(),), {}),
        (False, ATEN._to_copy.default, (X,), {"dtype": torch.float64}),
        (False, ATEN.mul.Tensor, (X, 2.0), {}),
        (False, ATEN.mul.Tensor, (X, torch.tensor(2.0)), {}),
        (False, ATEN.add.Tensor, (X, X), {"alpha": 2}),
        (False, ATEN.mul.Tensor, (X.flatten()[:6], X.flatten()[:6]), {}),
        (False, ATEN.mul.Tensor, (X, numbers(16, 8).T), {}),
        (False, ATEN.mul.Tensor, (X.float().to_sparse(), X.float().to_sparse()), {}),
        (False, ATEN.sin.default, (X,), {}),
        (False, ATEN.mul.Scalar, (X, 2.0), {}),
    ],
)
def test_which_calls_are_counted_as_fused(
    expected: bool, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert can_be_fused(call, op_name(call), args, kwargs, call(*args, **kwargs)) == expected
