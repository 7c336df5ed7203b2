"""Seconds of ops: each kind is timed once, and nothing that writes or draws runs a second time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.engine.step_comparison import assert_same, leaves
from torch import Tensor, nn

import memfit
from memfit.capture.measuring.clocks import HostClock, clock_for
from memfit.capture.measuring.op_costs import Cost, OpMeter, with_costs
from memfit.capture.measuring.roofline import Roofline, _flops_per_second
from memfit.capture.recording.step_recording import OpFacts
from memfit.graph.model_profile import Phase, RecordedOp, Replay


class CountingClock(HostClock):
    """Says that everything takes a second, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tried = 0
        self.num_timed = 0
        self.num_weighed = 0

    def seconds_of(self, call: Callable[[], object]) -> float:
        self.num_tried += 1
        for _ in range(3):
            call()
        return 1.0

    def run_timed(self, call: Callable[[], object]) -> tuple[Any, float]:
        self.num_timed += 1
        return call(), 2.0

    def run_weighed(self, call: Callable[[], object]) -> tuple[Any, int]:
        self.num_weighed += 1
        return call(), self.num_weighed


def network(num_blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout())
        for _ in range(num_blocks)
    )
    return nn.Sequential(*blocks)


def seen_after_a_step(model: nn.Module) -> dict[str, Any]:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return dict(leaves("it", [gradients, dict(model.state_dict()), torch.get_rng_state()]))


def test_timing_changes_nothing_in_the_step() -> None:
    plain, timed = network(3), network(3)
    torch.manual_seed(1)
    plain(torch.ones(2, 4)).sum().backward()
    clock = CountingClock()
    torch.manual_seed(1)
    with OpMeter(clock, timing_seconds=1e9):
        timed(torch.ones(2, 4)).sum().backward()
    assert clock.num_tried > 0
    assert clock.num_timed > 0
    assert_same(seen_after_a_step(plain), seen_after_a_step(timed))


def test_identical_blocks_are_timed_once() -> None:
    num_tried = []
    for num_blocks in (2, 8):
        clock = CountingClock()
        with OpMeter(clock, timing_seconds=1e9):
            network(num_blocks)(torch.ones(2, 4)).sum().backward()
        num_tried.append(clock.num_tried)
    assert num_tried[0] == num_tried[1]


def test_once_the_time_is_spent_ops_are_weighed_but_not_timed() -> None:
    clock = CountingClock()
    meter = OpMeter(clock, timing_seconds=0.0)
    with meter:
        network(2)(torch.ones(2, 4)).sum().backward()
    assert clock.num_tried == clock.num_timed == 0
    costs = meter.costs().values()
    assert all(cost.seconds is None for cost in costs)
    # Blocks repeat; each kind of op has the most that any of its runs took, and this clock gives each run more.
    assert len(costs) < clock.num_weighed == max(cost.workspace_bytes for cost in costs)


def fact(signature: str, *, flops: int = 0, moved_bytes: int = 0) -> OpFacts:
    return OpFacts(signature, flops, moved_bytes, torch.float32)


def recorded(flops: int = 0) -> RecordedOp:
    return RecordedOp("", "aten.op", 0, (), (), (), flops, Replay.YES)


def test_what_was_not_timed_is_estimated_from_what_was() -> None:
    facts = [
        fact("copy", moved_bytes=1000),
        fact("small", moved_bytes=10),
        fact("product", flops=600, moved_bytes=1),
        fact("untimed copy", moved_bytes=4040),
        fact("untimed tiny", moved_bytes=1),
        fact("untimed product", flops=1200, moved_bytes=1),
        fact("untimed nothing"),
    ]
    costs = {
        "copy": Cost(0.9, workspace_bytes=7),
        "small": Cost(0.11),
        "product": Cost(3.0),
        "untimed copy": Cost(None, workspace_bytes=9),
    }
    ops = with_costs([recorded() for _ in facts], facts, costs, torch.device("cpu"))
    # 1010 bytes in 1.01 seconds; 600 FLOPs in 3; nothing that does something is shorter than the fast_path.
    assert [op.seconds for op in ops] == pytest.approx([0.9, 0.11, 3.0, 4.04, 0.11, 6.0, 0.0])
    assert [op.workspace_bytes for op in ops] == [7, 0, 0, 9, 0, 0, 0]


def test_a_device_has_rates() -> None:
    roofline = Roofline.of_device(torch.device("cpu"), [torch.float32, torch.float64])
    assert roofline.flops_per_second[torch.float32] > 1e8
    assert roofline.flops_per_second[torch.float64] > 1e8
    assert roofline.bytes_per_second > 1e7
    assert roofline.seconds_of(fact("large", moved_bytes=10**12)) == 1e12 / roofline.bytes_per_second


def test_every_op_that_computes_has_seconds() -> None:
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Dropout(), nn.Linear(1024, 1024))
    profile = memfit.profile(model, torch.ones(64, 64))
    for op in profile.ops:
        assert (op.seconds > 0) == (op.op not in ("aten.empty_like", "aten.empty")), op
    products = [op for op in profile.ops if op.op == "aten.addmm" and op.phase is Phase.FORWARD]
    # Sixteen times the FLOPs.
    assert products[1].seconds > products[0].seconds
    assert profile.step_seconds > 0


def test_what_one_thread_computes_on_a_cpu_is_timed_in_its_own_seconds() -> None:
    assert torch.get_num_threads() == 1
    _, seconds = clock_for(torch.device("cpu")).run_timed(lambda: time.sleep(0.05))
    # As while another program has the processor.
    assert seconds < 0.04


@pytest.fixture
def no_rates_known() -> Iterator[None]:
    """Rates are measured once in a process: measure here, and let nobody else see it."""
    _flops_per_second.cache_clear()
    yield
    _flops_per_second.cache_clear()


@pytest.mark.usefixtures("no_rates_known")
def test_the_roofline_is_measured_with_as_much_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    randn, widths = torch.randn, []

    def scarce(*size: int, **options: Any) -> Tensor:
        widths.append(size[0])
        if size[0] > 128:
            raise torch.OutOfMemoryError
        return randn(*size, **options)

    monkeypatch.setattr(torch, "randn", scarce)
    assert Roofline.of_device(torch.device("cpu"), [torch.float32]).flops_per_second[torch.float32] > 0
    assert widths == [512, 256, 128]
