"""One tiny network, its profile worked out by hand: every op, every value's bytes, birth, death and saves.

Four rows of 3 numbers go through a layer to 5, tanh, dropout and a layer to 2 without a bias; the loss is the sum of
squares. Ops, by number:

    forward   0 addmm   1 tanh   2 empty_like   3 bernoulli_   4 div_   5 mul   6 mm   loss  7 mul   8 sum
    backward  9 ones_like   10 mul   11 mul   12 add   13 mm   14 mm   15 mul   16 tanh_backward   17 mm   18 sum
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.capture.recording.plain_timeline import plain_timeline_bytes
from memfit.graph.model_profile import ModelProfile, Phase, RecordedValue, Replay, Save

NUM_OPS = 19


def sum_of_squares(output: Tensor) -> Tensor:
    return (output * output).sum()


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 2, bias=False))
    return memfit.profile(model, torch.ones(4, 3), loss=sum_of_squares)


def named(profile: ModelProfile, name: str) -> RecordedValue:
    (value,) = (value for value in profile.values if value.name == name)
    return value


def test_ops_in_order_with_modules_and_flops(profile: ModelProfile) -> None:
    forward = [(op.module, op.op, op.flops) for op in profile.ops if op.phase is Phase.FORWARD]
    assert forward == [
        ("0", "aten.addmm", 2 * 4 * 3 * 5),
        ("1", "aten.tanh", 0),
        ("2", "aten.empty_like", 0),
        ("2", "aten.bernoulli_", 0),
        ("2", "aten.div_", 0),
        ("2", "aten.mul", 0),
        ("3", "aten.mm", 2 * 4 * 5 * 2),
        (None, "aten.mul", 0),
        (None, "aten.sum", 0),
    ]
    backward = [(op.module, op.op, op.flops) for op in profile.ops if op.phase is Phase.BACKWARD]
    assert backward == [
        (None, "aten.ones_like", 0),
        (None, "aten.mul", 0),
        (None, "aten.mul", 0),
        (None, "aten.add", 0),
        (None, "aten.mm", 2 * 2 * 4 * 5),
        (None, "aten.mm", 2 * 4 * 2 * 5),
        (None, "aten.mul", 0),
        (None, "aten.tanh_backward", 0),
        (None, "aten.mm", 2 * 5 * 4 * 3),
        (None, "aten.sum", 0),
    ]
    assert len(profile.ops) == NUM_OPS


@pytest.mark.parametrize(
    ("name", "num_bytes", "op_index", "dies_after", "saves"),
    [
        # From outside: parameters, the batch. The last layer's input gradient needs its weight, the first layer's
        # weight gradient needs the batch; nobody needs the gradient of the batch.
        ("0.weight", 4 * 15, None, None, ()),
        ("0.bias", 4 * 5, None, None, ()),
        ("3.weight", 4 * 10, None, None, (Save(13, 14, op_index=6),)),
        ("batch#0", 4 * 12, None, None, (Save(17, 18, op_index=0),)),
        # The addmm is over when tanh is; tanh and the mask wait for their product.
        ("0::aten.addmm#0", 4 * 20, 0, 1, ()),
        ("1::aten.tanh#0", 4 * 20, 1, 5, (Save(16, 16, op_index=1),)),
        ("2::aten.empty_like#0", 4 * 20, 2, 5, ()),
        ("2::aten.bernoulli_#0", 4 * 20, 3, 5, ()),
        ("2::aten.div_#0", 4 * 20, 4, 5, (Save(15, 15, op_index=5),)),
        # A product reads its second factor first.
        ("2::aten.mul#0", 4 * 20, 5, 6, (Save(13, 14, op_index=6, read_place=1),)),
        # The output is needed as long as the loss is computed. A square saves its factor twice.
        ("3::aten.mm#0", 4 * 8, 6, 8, (Save(10, 11, op_index=7), Save(10, 11, op_index=7, read_place=1))),
        ("(loss)::aten.mul#0", 4 * 8, 7, 8, ()),
        ("(loss)::aten.sum#0", 4, 8, 18, ()),
        # backward() holds the gradient it began with; others go with their last reader.
        ("(backward)::aten.ones_like#0", 4, 9, 18, ()),
        ("(backward)::aten.mul#0", 4 * 8, 10, 12, ()),
        ("(backward)::aten.mul#1", 4 * 8, 11, 12, ()),
        ("(backward)::aten.add#0", 4 * 8, 12, 14, ()),
        ("(backward)::aten.mm#0", 4 * 10, 13, None, ()),
        ("(backward)::aten.mm#1", 4 * 20, 14, 15, ()),
        ("(backward)::aten.mul#2", 4 * 20, 15, 16, ()),
        ("(backward)::aten.tanh_backward#0", 4 * 20, 16, 18, ()),
        ("(backward)::aten.mm#2", 4 * 15, 17, None, ()),
        ("(backward)::aten.sum#0", 4 * 5, 18, None, ()),
    ],
)
def test_value(
    profile: ModelProfile,
    name: str,
    num_bytes: int,
    op_index: int | None,
    dies_after: int | None,
    saves: tuple[Save, ...],
) -> None:
    value = named(profile, name)
    assert (value.num_bytes, value.op_index, value.dies_after, value.saves) == (num_bytes, op_index, dies_after, saves)


def test_there_are_no_other_values(profile: ModelProfile) -> None:
    assert len(profile.values) == 23


def test_values_written_over_in_place_share_a_storage(profile: ModelProfile) -> None:
    mask = [named(profile, f"2::aten.{op}#0") for op in ("empty_like", "bernoulli_", "div_")]
    assert len({value.storage for value in mask}) == 1
    assert len({value.storage for value in profile.values}) == 21
    indices = [profile.values.index(value) for value in mask]
    assert [(op.inputs, op.outputs, op.rewrites) for op in profile.ops[3:5]] == [
        ((), (indices[1],), (indices[0],)),
        ((indices[1],), (indices[2],), (indices[1],)),
    ]


def test_what_may_be_replayed(profile: ModelProfile) -> None:
    replays = [op.replay for op in profile.ops[:9]]
    assert replays == [Replay.YES if index != 2 else Replay.STATEFUL for index in range(9)]


def test_peak_is_where_the_input_gradient_of_the_last_layer_is_made(profile: ModelProfile) -> None:
    outside = 60 + 20 + 40 + 48
    loss_and_its_gradient = 4 + 4
    saved = 3 * 80
    gradients = 32 + 40 + 80
    timeline_bytes = plain_timeline_bytes(profile.ops, profile.values)
    assert profile.peak_bytes == outside + loss_and_its_gradient + saved + gradients == 568
    assert timeline_bytes.index(568) == 14
