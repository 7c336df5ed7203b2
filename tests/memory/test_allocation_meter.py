"""What the meter counts: by hand where the bytes are known, and as torch's profiler does elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memfit.runtime import allocation_meter
from memfit.runtime.allocation_meter import AllocationMeter, allocated_inside, allocated_peak

CPU = torch.device("cpu")
KIB = 1024


def buffer(num_kib: int) -> Tensor:
    return torch.empty(num_kib * KIB, dtype=torch.uint8)


@pytest.fixture(params=["meter", "profiler"])
def measured_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count by the engine in C++, and as where there is no compiler."""
    if request.param == "profiler":
        monkeypatch.setattr(allocation_meter, "native_module", lambda: None)


@pytest.mark.usefixtures("measured_by")
def test_what_lives_at_once_counts() -> None:
    def step() -> None:
        first = buffer(3)
        second = buffer(5)
        del first
        third = buffer(1)
        del second, third
        buffer(7)

    assert allocated_peak(step, CPU) == 8 * KIB


@pytest.mark.usefixtures("measured_by")
def test_what_is_held_counts_once_until_it_is_freed() -> None:
    held = [buffer(10), buffer(20)]

    def step() -> None:
        buffer(1)
        del held[1]
        buffer(15)

    # An iterator gives up its list when it is exhausted. An assertion would keep it, and so does a call after a
    # compiler replaced how the interpreter evaluates frames.
    peak_bytes = allocated_peak(step, CPU, iter([*held, held[0].view(2, -1)]))
    assert peak_bytes == 31 * KIB
    # The second one is gone.
    assert allocated_peak(lambda: buffer(15), CPU, held) == 25 * KIB


@pytest.mark.usefixtures("measured_by")
def test_memory_from_before_that_is_not_held_does_not_count_when_it_is_freed() -> None:
    unknown = [buffer(100)]

    def step() -> None:
        kept = buffer(2)
        unknown.clear()
        buffer(4)
        del kept

    assert allocated_peak(step, CPU) == 6 * KIB


@pytest.mark.usefixtures("measured_by")
def test_memory_left_by_one_measured_step_is_not_taken_for_that_of_the_next() -> None:
    left: list[Tensor] = []
    allocated_peak(lambda: left.append(buffer(64)), CPU)
    left.clear()
    # It may get the same address; it is no part of what is measured, and neither is its end.
    left.append(buffer(64))

    def step() -> None:
        kept = buffer(3)
        left.clear()
        buffer(5)
        del kept

    assert allocated_peak(step, CPU) == 8 * KIB


@pytest.mark.usefixtures("measured_by")
def test_a_resized_storage_needs_both_its_old_and_its_new_memory() -> None:
    def step() -> None:
        x = buffer(4)
        x.untyped_storage().resize_(6 * KIB)

    assert allocated_peak(step, CPU) == 10 * KIB


def test_a_free_in_a_thread_without_the_meter_counts_when_it_happens() -> None:
    with AllocationMeter() as meter:
        held = [buffer(3), buffer(5)]
        thread = threading.Thread(target=held.pop)
        thread.start()
        thread.join()
        assert meter.live_bytes == 3 * KIB
        buffer(4)
    assert meter.peak_bytes == 8 * KIB
    # What is left refers to the meter's allocator, which outlives it.
    held[0].untyped_storage().resize_(KIB)
    del held


@pytest.mark.usefixtures("measured_by")
def test_what_an_op_holds_beyond_its_result_is_what_is_gone_afterwards() -> None:
    def op() -> Tensor:
        workspace = buffer(9)
        result = buffer(2)
        del workspace
        return result

    result, num_bytes = allocated_inside(op)
    assert (result.nbytes, num_bytes) == (2 * KIB, 9 * KIB)
    _, num_bytes = allocated_inside(lambda: buffer(2))
    assert num_bytes == 0


def convolutions() -> Callable[[], None]:
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3))
    x = torch.randn(4, 8, 32, 32)
    return lambda: model(x).square().sum().backward()


def reentrant_checkpoints() -> Callable[[], None]:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(32, 64, requires_grad=True)
    return lambda: checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True).sum().backward()


def custom_functions() -> Callable[[], None]:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return 2 * gradient

    x = torch.randn(64, 64, requires_grad=True)
    return lambda: Double.apply(x).sin().sum().backward()


@pytest.mark.parametrize("make_step", [convolutions, reentrant_checkpoints, custom_functions])
def test_steps_take_what_the_profiler_of_torch_reports(
    make_step: Callable[[], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    step = make_step()
    step()
    by_meter = allocated_peak(step, CPU)
    monkeypatch.setattr(allocation_meter, "native_module", lambda: None)
    assert allocated_peak(step, CPU) == by_meter > 0


def test_live_bytes_and_peaks_can_be_read_as_a_step_runs() -> None:
    held = buffer(1)
    with AllocationMeter([held]) as meter:
        first = buffer(2)
        assert (meter.live_bytes, meter.peak_bytes) == (3 * KIB, 3 * KIB)
        del first
        assert (meter.live_bytes, meter.peak_bytes) == (KIB, 3 * KIB)
        meter.restart_peak()
        assert meter.peak_bytes == KIB
    assert (meter.live_bytes, meter.peak_bytes) == (KIB, KIB)


def test_a_profiler_of_the_user_goes_on_after_a_step_was_measured() -> None:
    x = torch.ones(8)
    with torch.profiler.profile(profile_memory=True) as profiler:
        x.sin()
        assert allocated_peak(lambda: x.cos().exp(), CPU) == 2 * x.nbytes
        x.tan()
    ops = {event.key for event in profiler.key_averages()}
    assert {"aten::sin", "aten::tan"} <= ops
    assert "aten::cos" not in ops


def test_a_step_that_fails_leaves_no_meter() -> None:
    def failing() -> None:
        buffer(3)
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            allocated_peak(failing, CPU)
    assert allocated_peak(lambda: buffer(3), CPU) == 3 * KIB
