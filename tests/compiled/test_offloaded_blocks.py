"""Compiled blocks that offload what they save: on the CPU, where copies are done at once and count no memory."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.compiled.measured_models import Case, gradients, measured, same
from tests.compiled.test_partition_mix import all_choices, drawn_profile, walked_peak
from tests.loop_peaks import peaks_of_steps
from torch import Tensor, nn

import memfit
from memfit.graph.compiled_data.compiled_blocks import (
    CompiledBlock,
    CompiledKind,
    CompiledProfile,
    MeasuredPartition,
    Partition,
    SegmentKind,
    SentTensors,
    StepSegment,
)
from memfit.graph.model_profile import Link
from memfit.planning.partitions.offloaded_mix import mixes_within
from memfit.runtime.allocation_meter import AllocationMeter
from memfit.runtime.compiling.offloaded_saves import OffloadedSaves

FAST = Link(1e15, 1e15, 0.0, 2**40)
SLOW = Link(1.0, 1.0, 0.0, 2**40)


@pytest.fixture(scope="module")
def case() -> Case:
    found = measured("gpt")
    return found._replace(profile=replace(found.profile, device="cuda", link=FAST))


def offloading_plan(case: Case, share: float = 0.8) -> memfit.Plan:
    """Return the plan that may offload for a budget between the smallest peak (0) and that of the fastest plan (1)."""
    return memfit.plan(case.profile, budget=case.plan(share).budget_bytes, host_budget="1GiB")


def played_peak(profile: CompiledProfile, choice: tuple[int, ...], sent: list[int]) -> int:
    """Return the peak where the first blocks send so many bytes, by the rules of copies, segment by segment."""
    measured_of = [block.measured[number] for block, number in zip(profile.blocks, choice, strict=True)]
    sent = [*sent, *[0] * (len(measured_of) - len(sent))]
    window, last = max(sent), max(place for place, num_bytes in enumerate(sent) if num_bytes)
    peak, leaving, fetched, is_backward = 0, 0, set(), False
    for segment in profile.segments:
        place = segment.block
        is_backward |= segment.kind is SegmentKind.BACKWARD
        holding = measured_of[: segment.num_held]
        live = segment.base_bytes + sum(each.held_bytes for each in holding)
        live += sum(one.output_bytes for one, after in itertools.pairwise(holding) if not after.keeps_input)
        live -= sum(sent[: segment.num_held])
        if place is None:
            ahead = min(window, sum(sent[: segment.num_held])) if fetched else 0
            peak = max(peak, live + (ahead if is_backward else leaving))
        elif segment.kind is SegmentKind.FORWARD:
            peak = max(peak, live + leaving + measured_of[place].forward_bytes)
            leaving = sent[place]
        else:
            if place <= last + 1:
                fetched.add(place)
            ahead = min(window, sum(sent[:place])) if fetched else 0
            peak = max(
                peak, live + sent[place] + ahead + measured_of[place].output_bytes + measured_of[place].backward_bytes
            )
    return peak


@pytest.mark.parametrize("seed", range(6))
def test_peaks_of_mixes_that_offload_are_those_of_the_rules_played_through(seed: int) -> None:
    profile = drawn_profile(seed, num_blocks=4)
    blocks = tuple(
        replace(block, measured=tuple(replace(each, saved_sizes=(30, 20)) for each in block.measured))
        for block in profile.blocks
    )
    profile = replace(profile, blocks=blocks)
    least = min(walked_peak(profile, choice) for choice in all_choices(profile))
    found = list(mixes_within(profile, least, 2**20, FAST, 1.0))
    assert found
    for mix in found:
        sent = [tensors.among((30, 20)) for tensors in mix.offloaded.values()]
        assert mix.peak_bytes == played_peak(profile, mix.choice, [sum(sizes) for sizes in sent]) <= least
        # torch rounds pinned blocks up to powers of two.
        assert mix.host_bytes == sum(32 for sizes in sent for _ in sizes)
    assert {sum(tensors.among((30, 20))) for mix in found for tensors in mix.offloaded.values()} == {20, 30, 50}


def test_a_fast_link_makes_offloading_the_fastest_plan(case: Case) -> None:
    budget = case.plan(0.7).predicted_peak_bytes
    alone = memfit.plan(case.profile, budget=budget)
    plan = memfit.plan(case.profile, budget=budget, host_budget="1GiB")
    assert plan.compiled is not None
    assert plan.compiled.offloaded
    assert plan.host_bytes > 0
    assert plan.predicted_overhead < alone.predicted_overhead


@pytest.mark.parametrize("share", [0.7])
def test_gradients_are_the_same_and_peaks_within_the_budget(case: Case, share: float) -> None:
    plan = offloading_plan(case, share)
    assert plan.compiled is not None
    assert plan.compiled.offloaded
    with memfit.apply(case.model, replace(plan, compiled=replace(plan.compiled, offloaded={}))):
        expected = gradients(case.model, case.batch)
        held_peaks = peaks_of_steps(case.model, case.batch, lambda loss: loss, num_steps=1)
    with memfit.apply(case.model, plan):
        assert same(expected, gradients(case.model, case.batch))
        peaks = peaks_of_steps(case.model, case.batch, lambda loss: loss)
    assert plan.budget_bytes is not None
    assert max(peaks) <= plan.budget_bytes
    assert max(peaks) == pytest.approx(plan.predicted_peak_bytes, rel=0.05)
    assert max(peaks) < max(held_peaks)


def test_what_was_saved_can_be_read_twice_and_is_given_up_with_the_graph(case: Case) -> None:
    plan = offloading_plan(case)
    model = case.model
    with memfit.apply(model, plan):
        expected = gradients(model, case.batch)[:-1]
        model.zero_grad()
        torch.manual_seed(5)
        # Two passes before the first backward pass, as in accumulation.
        losses = [model(case.batch), model(case.batch)]
        losses[0].backward()
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        assert same(expected, found)
        losses[1].backward()
        del losses
        gc.collect()
        assert len(set(peaks_of_steps(model, case.batch, lambda loss: loss, num_steps=2))) == 1
    model.zero_grad()


def test_what_is_saved_is_checked_as_without_hooks(case: Case) -> None:
    """A parameter that is changed between forward and backward pass raises, whether or not its block offloads."""
    model = case.model
    with memfit.apply(model, offloading_plan(case)):
        for block in (model.blocks[0], model.blocks[-1]):
            loss = model(case.batch)
            with torch.no_grad():
                next(each for name, each in block.named_parameters() if name.endswith("weight")).add_(0.0)
            with pytest.raises(memfit.StaleValueError, match="was changed between the forward and the backward pass"):
                loss.backward()
    model.zero_grad()


def test_failed_passes_hold_nothing() -> None:
    block = nn.Linear(4, 4)
    saves = OffloadedSaves(block, {"first": SentTensors(1024, 2**40, 8)}, ["first", "second"])
    x = torch.randn(64, 64, requires_grad=True)
    with AllocationMeter([x]) as meter:

        def failing() -> None:
            with saves.saving("first", block):
                x.exp()
                raise KeyError("in the middle of a block")

        with pytest.raises(KeyError):
            failing()
        assert meter.live_bytes == x.nbytes
        with saves.saving("first", block):
            y = x.exp()
        # It leaves until the next block is done.
        assert meter.live_bytes == 2 * x.nbytes
        with saves.saving("second", block):
            pass
        y = y.sum()
        assert meter.live_bytes == x.nbytes + y.nbytes


def test_the_first_tensors_of_the_given_sizes_leave_and_none_that_an_earlier_block_keeps() -> None:
    block = nn.Linear(4, 4)
    sent = SentTensors(2**14, 2**15, 1)
    saves = OffloadedSaves(block, {"first": sent, "second": sent}, ["first", "second", "third"])
    small, middle, large = (torch.randn(size, requires_grad=True) for size in (2**11, 2**12, 2**14))
    with AllocationMeter([small, middle, large]) as meter:
        start = meter.live_bytes
        with saves.saving("first", block):
            # Each is saved by its own op: too small, the first to leave, one too many, too large.
            kept = [small.exp().sum(), middle.exp().sum()]
            shared = middle.exp()
            kept += [shared.sum(), large.exp().sum()]
        with saves.saving("second", block):
            # It reads what the first block keeps, whose memory would not be freed.
            kept.append((shared * shared).sum())
        with saves.saving("third", block):
            pass
        scalars = sum(each.nbytes for each in kept)
        assert meter.live_bytes - start == small.nbytes + middle.nbytes + large.nbytes + scalars
        sum(kept).backward()
    expected = [each.detach().clone().requires_grad_() for each in (small, middle, large)]
    squared = expected[1].exp()
    sum(
        [
            expected[0].exp().sum(),
            expected[1].exp().sum(),
            squared.sum(),
            expected[2].exp().sum(),
            (squared * squared).sum(),
        ]
    ).backward()
    assert all(torch.equal(one.grad, other.grad) for one, other in zip((small, middle, large), expected, strict=True))


def test_blocks_that_send_alike_mix_partitions_and_tensors_of_one_size_may_leave_alone() -> None:
    # A link that carries one small tensor beside a forward pass, and not one large one.
    link = Link(1e6, 1e6, 0.0, 2**40)
    lean = MeasuredPartition(1_100_000, 0, 0, 0.9, (1_000_000, 100_000))
    fast = MeasuredPartition(2_100_000, 0, 0, 0.6, (1_000_000, 1_000_000, 100_000))
    blocks = tuple(CompiledBlock(f"blocks.{place}", 0, (fast, lean)) for place in range(6))
    passes = [StepSegment(SegmentKind.FORWARD, place, place, 0) for place in range(6)]
    passes += [StepSegment(SegmentKind.BACKWARD, place, place + 1, 0) for place in reversed(range(6))]
    partitions = (Partition("everything", 0.0, {}), Partition("least", 1.0, {}))
    kind = CompiledKind("Block", tuple(block.path for block in blocks), partitions)
    profile = CompiledProfile((kind,), blocks, tuple(passes), 0.0, 4.0)
    best = min(mixes_within(profile, 11_300_000, 2**30, link, 1.0), key=lambda mix: mix.seconds)
    assert set(best.offloaded.values()) == {SentTensors(100_000, 100_000, 1)}
    assert set(best.choice[: len(best.offloaded)]) == {0, 1}


def test_hooks_of_the_users_see_what_is_saved(case: Case) -> None:
    """Under saved-tensor hooks around the model, such as torch.utils.checkpoint's, nothing leaves."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor.detach()

    with memfit.apply(case.model, offloading_plan(case)):
        expected = gradients(case.model, case.batch)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            num_before = len(saved)
            assert same(expected, gradients(case.model, case.batch))
    assert sum(each.shape[:2] == case.batch[:, 1:].shape for each in saved[num_before:]) > 3


def test_a_slow_link_is_not_used(case: Case) -> None:
    budget = case.plan(0.7).predicted_peak_bytes
    plan = memfit.plan(replace(case.profile, link=SLOW), budget=budget, host_budget="1GiB")
    assert plan.compiled is not None
    assert not plan.compiled.offloaded


def test_plans_with_offloading_survive_their_file(case: Case, tmp_path: Path) -> None:
    plan = offloading_plan(case)
    plan.save(tmp_path / "plan.json")
    again = memfit.Plan.load(tmp_path / "plan.json")
    assert again.compiled == plan.compiled
    assert again.host_bytes == plan.host_bytes


def test_no_more_of_the_hosts_memory_is_planned_for_than_was_given(case: Case) -> None:
    most = offloading_plan(case).host_bytes
    points = memfit.frontier(case.profile, points=5, host_budget=most // 2)
    assert all(point.plan.host_bytes <= most // 2 for point in points)
