"""The memory of the plain step, told from its profile alone, is what the allocator reports."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.engine.plans import profile_of
from tests.engine.zoo import ZOO, Example

from memfit.calibration.calibrating import UNACCOUNTED, unaccounted_memory
from memfit.capture.measuring.other_memory import LEFT_BEHIND
from memfit.capture.recording.plain_timeline import plain_timeline_bytes
from memfit.graph.model_profile import HostCosts, ModelProfile, Phase, RecordedOp, RecordedValue, Replay, Save

# Numbers of Python that ops turn into tensors, and the like, are allocated where no op returns them.
SCALARS_BYTES = 256
# torch's checkpointing keeps the state of the random number generator, 5056 bytes for each call; a dispatch mode makes
# the backward pass of packed sequences add gradients out of place. The second step of a model with a cache is measured,
# and the cache that the first one left is not counted until the second one begins.
NOT_RECORDED = {"checkpoint-inside", "checkpoint-inside-reentrant", "lstm-packed-sequences", "growing-cache"}


@pytest.mark.parametrize("example", [example for example in ZOO if example.name not in NOT_RECORDED], ids=str)
def test_timeline_peaks_at_the_measured_peak(example: Example) -> None:
    profile = profile_of(example)
    assert abs(max(plain_timeline_bytes(profile.ops, recorded_values(profile))) - profile.peak_bytes) <= SCALARS_BYTES


@pytest.mark.parametrize("example", ZOO, ids=str)
def test_what_was_measured_beyond_the_timeline_is_part_of_the_profile(example: Example) -> None:
    profile = profile_of(example)
    assert max(plain_timeline_bytes(profile.ops, profile.values)) >= profile.peak_bytes


def recorded_values(profile: ModelProfile) -> list[RecordedValue]:
    """Return the values of one step by itself."""
    return [value for value in profile.values if value.name not in (UNACCOUNTED, LEFT_BEHIND)]


# What saves without an op, after an op of another module.
SAVING_WITHOUT_OPS = {"function-running-a-module-again", "checkpoint-inside", "checkpoint-inside-reentrant"}
# In torch 2.11 jagged tensors do so, too.
if torch.__version__ < (2, 12):
    SAVING_WITHOUT_OPS.add("jagged-batch")


@pytest.mark.parametrize("example", ZOO, ids=str)
def test_profile_is_consistent_in_itself(example: Example) -> None:
    profile = profile_of(example)
    num_ops = len(profile.ops)
    phases = [op.phase for op in profile.ops]
    assert phases == sorted(phases, key=list(Phase).index)
    assert len({value.name for value in profile.values}) == len(profile.values)
    for index, value in enumerate(profile.values):
        if value.op_index is not None:
            assert index in profile.ops[value.op_index].outputs
            assert value.dies_after is None or value.op_index <= value.dies_after < num_ops
        for save in value.saves:
            assert 0 <= save.released_after < num_ops
            assert save.read_before == num_ops or save.read_before <= save.released_after + 1
            if save.op_index is None:
                assert example.name in SAVING_WITHOUT_OPS
            else:
                assert profile.ops[save.op_index].phase is Phase.FORWARD
    for position, op in enumerate(profile.ops):
        assert (op.phase is Phase.FORWARD) or op.module is None
        for index in (*op.inputs, *op.rewrites):
            made_at = profile.values[index].op_index
            assert made_at is None or made_at < position


def op(inputs: tuple[int, ...], outputs: tuple[int, ...], *, workspace_bytes: int = 0) -> RecordedOp:
    return RecordedOp("", "aten.op", 0, inputs, outputs, (), 0, Replay.YES, workspace_bytes=workspace_bytes)


def test_timeline_counts_each_storage_from_its_making_to_its_last_use() -> None:
    values = (
        RecordedValue("weight", 1000, None, storage=0),
        RecordedValue("a", 100, 0, storage=1, dies_after=1),
        RecordedValue("b", 10, 1, storage=2, dies_after=1, saves=(Save(3, 3),)),
        # Written over in place: one storage, counted once.
        RecordedValue("c", 10, 2, storage=2, dies_after=2),
        RecordedValue("d", 1, 2, storage=3),
    )
    ops = (op((0,), (1,)), op((1,), (2,), workspace_bytes=5000), op((2,), (3, 4)), op((2,), ()), op((4,), ()))
    assert plain_timeline_bytes(ops, values) == [1100, 6110, 1011, 1011, 1001]
    # What was measured beyond that is there all the time, for all that is known.
    measured = ModelProfile(ops, values, (), 6110, 1.0, "cpu", "f")
    assert unaccounted_memory(measured) == ()
    more = dataclasses.replace(measured, peak_bytes=6117)
    assert unaccounted_memory(more) == (RecordedValue(UNACCOUNTED, 7, None, storage=4),)


def test_what_an_allocator_counts_too_much_goes_with_the_buffers() -> None:
    mib = 2**20
    odd_bytes = 11 * mib + 512
    values = (RecordedValue("x", odd_bytes, None, 0), RecordedValue("::aten.sin#0", odd_bytes, 0, 1))
    host = HostCosts(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    on_gpu = ModelProfile((op((0,), (1,)),), values, (), odd_bytes + 12 * mib, 1.0, "cuda:0", "f", host=host)
    # A segment of 12 MiB is handed out whole. What was there before the step is none of its business.
    assert unaccounted_memory(on_gpu) == ()
    (more,) = unaccounted_memory(dataclasses.replace(on_gpu, peak_bytes=on_gpu.peak_bytes + mib))
    assert more.num_bytes == mib
    (on_cpu,) = unaccounted_memory(dataclasses.replace(on_gpu, device="cpu"))
    assert on_cpu.num_bytes == mib - 512


def test_timeline_of_a_profile_without_saves_is_no_higher() -> None:
    profile = profile_of(next(example for example in ZOO if example.name == "gpt"))
    unsaved = tuple(dataclasses.replace(value, saves=()) for value in profile.values)
    peak_bytes = max(plain_timeline_bytes(profile.ops, unsaved))
    floor_bytes = sum({v.storage: v.num_bytes for v in profile.values if v.op_index is None}.values())
    assert isinstance(profile, ModelProfile)
    assert floor_bytes < peak_bytes < profile.peak_bytes
