"""Steps timed alone and in a row: how many run, and that they leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from memfit.capture.measuring.step_times import (
    SynchronizedStep,
    timed_back_to_back,
    timed_interleaved,
    timed_synchronized,
)
from memfit.capture.state.kept_state import KeptState
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep


class Counting(nn.Module):
    """Notes at each forward pass whether its weight has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("num_runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        had_gradient.append(self.weight.grad is not None)
        self.num_runs += 1
        return x * self.weight


had_gradient: list[bool] = []


@pytest.mark.parametrize(("seconds_alone", "num_steps"), [(0.4, 5), (0.1, 15), (1e-6, 30)])
def test_steps_in_a_row_begin_without_gradients_and_leave_no_trace(seconds_alone: float, num_steps: int) -> None:
    model = Counting()
    model.weight.grad = gradient = torch.full((3,), 7.0)
    step = TrainingStep(model, StepArguments(torch.ones(3), optimizer=torch.optim.SGD(model.parameters())))
    state = KeptState(step)
    with state.kept():
        step.run()
    had_gradient.clear()
    alone = SynchronizedStep(0.0, 0.0, seconds_alone)
    timed_back_to_back(step, torch.device("cpu"), state, alone)
    assert had_gradient == [False] * num_steps
    assert model.weight.grad is gradient
    assert model.weight.tolist() == [1.0] * 3
    assert model.num_runs.item() == 0


def test_each_step_in_a_row_finds_the_counters_of_the_first() -> None:
    """As a cache with room for a few steps needs it."""

    class Filling(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.num_used = 0
            self.slots: dict[str, list[int]] = {"all": []}

        def forward(self, x: Tensor) -> Tensor:
            assert len(self.slots["all"]) == self.num_used < 2
            self.num_used += 1
            self.slots["all"].append(self.num_used)
            return super().forward(x)

    model = Filling()
    step = TrainingStep(model, StepArguments(torch.ones(3)))
    state = KeptState(step)
    with state.kept():
        step.run()
    timed_back_to_back(step, torch.device("cpu"), state, SynchronizedStep(0.0, 0.0, 1e-6))
    assert (model.num_used, model.slots) == (0, {"all": []})


def test_the_first_step_in_a_row_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Lasting(Counting):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal now
            # The first step takes as long as one alone; each of those behind it takes less.
            now += 5.0 if now == 0.0 else 3.0
            return super().forward(x)

    step = TrainingStep(Lasting(), StepArguments(torch.ones(3)))
    state = KeptState(step)
    monkeypatch.setattr("memfit.capture.measuring.clocks.time.perf_counter", lambda: now)
    monkeypatch.setattr("memfit.capture.measuring.clocks.time.thread_time", lambda: now)
    assert timed_back_to_back(step, torch.device("cpu"), state, SynchronizedStep(0.0, 0.0, 5.0)) == 3.0


def test_back_to_back_seconds_leave_out_disturbances_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Moments:
        """Those of a device that each second step keeps waiting."""

        def __init__(self) -> None:
            self.num_marks = 0

        def mark(self) -> None:
            self.num_marks += 1

        def seconds_between(self) -> list[float]:
            assert self.num_marks == 5
            return [9.0, 3.0, 9.0, 3.0]

    monkeypatch.setattr("memfit.capture.measuring.step_times.moments_on", lambda _: Moments())
    step = TrainingStep(Counting(), StepArguments(torch.ones(3)))
    assert timed_back_to_back(step, torch.device("cpu"), KeptState(step), SynchronizedStep(0.0, 0.0, 5.0)) == 3.0


def test_two_methods_are_interleaved_and_warm_up_untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host that slows down step by step, both are as slow: the lower quartiles are of the second of five turns."""
    now, num_runs, is_inside, order = 0.0, 0, False, []

    class Slowing(Counting):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal now, num_runs
            num_runs += 1
            now += num_runs + (100.0 if is_inside else 0.0)
            order.append(is_inside)
            return super().forward(x)

    @contextmanager
    def inside() -> Iterator[None]:
        nonlocal is_inside
        is_inside = True
        yield
        is_inside = False

    step = TrainingStep(Slowing(), StepArguments(torch.ones(3)))
    monkeypatch.setattr("memfit.capture.measuring.clocks.time.perf_counter", lambda: now)
    monkeypatch.setattr("memfit.capture.measuring.clocks.time.thread_time", lambda: now)
    plain, other = timed_interleaved(step, torch.device("cpu"), KeptState(step), inside, num_rounds=5)
    assert order == ([False] * 2 + [True] * 3) * 5
    assert plain.forward_launched == 6 + 0.25
    assert other.forward_launched == 100 + 9 + 0.25
    assert (plain.backward_launched, other.backward_launched) == (0.0, 0.0)


def test_each_part_of_a_synchronized_step_takes_time() -> None:
    model = Counting()
    step = TrainingStep(model, StepArguments(torch.ones(3)))
    assert min(timed_synchronized(step, torch.device("cpu"), KeptState(step))) > 0


def test_what_is_put_on_a_model_between_runs_stays_there_after_a_run() -> None:
    """Methods that are timed interleaved wrap modules around several runs. Snapshots are kept from run to run."""
    model = Counting()
    step = TrainingStep(model, StepArguments(torch.ones(3)))
    state = KeptState(step)
    for wrapper in (None, model.forward, None):
        if wrapper is None:
            vars(model).pop("forward", None)
        else:
            vars(model)["forward"] = wrapper
        before = dict(vars(model))
        for _ in range(2):
            with state.kept():
                step.run()
            assert vars(model) == before
