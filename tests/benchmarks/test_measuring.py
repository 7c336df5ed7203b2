"""How the benchmarks measure: methods that fail or are slow, time that runs out, and everything put back afterwards."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from frontier_compiled import compile_ahead, time_limit
from frontier_models import SUBJECTS
from gradients import compare, sums_in_a_fixed_order
from measuring import Race, TimeLimitError, measure
from peers import transformers_switch
from pinning import pinned
from torch import Tensor, nn


class Subject:
    """One linear layer, and a count of its forward passes."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.batch = torch.ones(2, 4)
        self.num_passes = 0

    def output_and_loss(self) -> tuple[Tensor, Tensor]:
        self.num_passes += 1
        loss = self.model(self.batch).sum()
        return loss, loss

    def race(self) -> Race:
        race = Race(self.model, self.output_and_loss, [self.batch], keep_gradients=False)
        race.enter("plain", contextlib.nullcontext)
        return race


@contextlib.contextmanager
def failing() -> Iterator[None]:
    yield
    raise torch.OutOfMemoryError("CUDA out of\n memory")


def test_a_way_that_raises_says_why_and_the_others_go_on() -> None:
    race = Subject().race()
    assert race.enter("broken", failing) is not None
    race.enter("plain again", contextlib.nullcontext)
    race.compare_gradients(num_repeats=1)
    race.run_rounds(2, steps_per_round=3)
    plain, broken, again = race.rows()
    assert broken.error == "OutOfMemoryError: CUDA out of memory"
    assert (broken.ratio, broken.gradient_error, broken.num_timed_steps) == (None, None, None)
    assert [(row.num_timed_steps, row.error, row.gradients_equal) for row in (plain, again)] == [(6, None, True)] * 2


def test_the_first_way_may_not_fail() -> None:
    subject = Subject()
    race = Race(subject.model, subject.output_and_loss, [subject.batch], keep_gradients=False)
    with pytest.raises(RuntimeError, match="all are compared with failed: OutOfMemoryError"):
        race.enter("plain", failing)


def test_measure_lets_no_failure_pass() -> None:
    subject = Subject()
    with pytest.raises(RuntimeError, match="broken: OutOfMemoryError"):
        measure(
            {"plain": contextlib.nullcontext, "broken": failing},
            subject.output_and_loss,
            subject.model,
            [subject.batch],
            num_rounds=1,
            steps_per_round=1,
            keep_gradients=True,
        )


def test_a_slow_way_takes_one_step_in_each_of_two_rounds() -> None:
    subject = Subject()
    race = subject.race()
    before = subject.num_passes
    race.enter("slow", contextlib.nullcontext, slow_limit_seconds=60.0)
    assert subject.num_passes == before + 1
    race.run_rounds(4, steps_per_round=3)
    plain, slow = race.rows()
    assert (plain.num_timed_steps, slow.num_timed_steps, slow.error) == (12, 2, None)


def test_a_slow_way_over_its_limit_keeps_its_peak_and_is_not_timed() -> None:
    race = Subject().race()
    peak_bytes = race.enter("slow", contextlib.nullcontext, slow_limit_seconds=0.0)
    race.compare_gradients(num_repeats=0)
    race.run_rounds(1, steps_per_round=1)
    slow = race.rows()[1]
    assert slow.peak_bytes == peak_bytes is not None
    assert slow.ratio is None
    assert slow.error is not None
    assert slow.error.startswith("not timed: its first step took ")


@pytest.mark.parametrize(("lead_in_seconds", "num_lead_in_steps"), [(0.0, 1), (3600.0, 6)])
def test_short_steps_run_a_few_times_before_they_are_timed_and_nothing_is_collected_meanwhile(
    lead_in_seconds: float, num_lead_in_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rounds._LEAD_IN_SECONDS", lead_in_seconds)
    subject = Subject()
    race = subject.race()
    collecting: list[bool] = []

    @contextlib.contextmanager
    def noting() -> Iterator[None]:
        collecting.append(gc.isenabled())
        yield

    race.enter("noting", noting)
    before = subject.num_passes
    race.run_rounds(2, steps_per_round=4)
    assert subject.num_passes == before + 2 * 2 * (num_lead_in_steps + 4)
    assert [row.num_timed_steps for row in race.rows()] == [8, 8]
    assert collecting == [True, False, False]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(("seconds_left", "num_rounds"), [(-1.0, 3), (3600.0, 5)])
def test_rounds_end_with_the_time_but_not_before_the_fewest(seconds_left: float, num_rounds: int) -> None:
    race = Subject().race()
    end_by = time.perf_counter() + seconds_left
    assert race.run_rounds(5, steps_per_round=2, fewest_rounds=3, end_by=end_by) == num_rounds
    assert race.rows()[0].num_timed_steps == 2 * num_rounds


def test_the_way_that_all_are_compared_with_takes_its_turn_again_between_the_others() -> None:
    turns: list[int] = []

    @contextlib.contextmanager
    def noting(number: int) -> Iterator[None]:
        turns.append(number)
        yield

    subject = Subject()
    race = Race(subject.model, subject.output_and_loss, [subject.batch], keep_gradients=False)
    for number in range(12):
        race.enter(str(number), lambda number=number: noting(number))
    turns.clear()
    race.run_rounds(2, steps_per_round=3)
    there = [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10, 11]
    assert turns == [*there, *reversed(there)]
    assert [row.num_timed_steps for row in race.rows()] == [12] + [6] * 11


def test_the_same_way_under_another_name_has_the_same_numbers() -> None:
    race = Subject().race()
    race.enter_as("also plain", "plain")
    race.run_rounds(1, steps_per_round=2)
    plain, same = race.rows()
    assert (same.method, same.same_as) == ("also plain", "plain")
    assert (same.median_ms, same.quartiles_ms, same.peak_bytes) == (
        plain.median_ms,
        plain.quartiles_ms,
        plain.peak_bytes,
    )


def test_gradients_are_compared_tensor_by_tensor_and_a_nan_is_as_far_as_can_be() -> None:
    reference = [torch.tensor([1.0, -4.0]), torch.tensor([2.0])]
    assert compare([t.clone() for t in reference], reference) == 0.0
    assert compare([torch.tensor([1.0, -3.0]), torch.tensor([2.0])], reference) == 0.25
    assert compare([reference[0], torch.tensor([float("nan")])], reference) == float("inf")


class Straying(nn.Module):
    """Its gradients are off in some of its steps unless torch is asked for a fixed order, and always while wrong."""

    def __init__(self, stray_steps: Callable[[int], bool]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.is_wrong = False
        self._strays = stray_steps
        self._num_steps = 0

    def loss(self) -> tuple[Tensor, Tensor]:
        self._num_steps += 1
        strays = not torch.are_deterministic_algorithms_enabled() and self._strays(self._num_steps)
        loss = (self.weight * (1.0 + 1.0 * strays + 0.125 * self.is_wrong)).sum()
        return loss, loss

    @contextlib.contextmanager
    def wrong(self) -> Iterator[None]:
        self.is_wrong = True
        yield
        self.is_wrong = False


@pytest.mark.parametrize(
    ("stray_steps", "kernel_noise"),
    [
        pytest.param(lambda number: number % 2 == 1, 0.5, id="in every second step"),
        # Entering takes six steps, the plain steps three, the reference one, and the second method is next.
        pytest.param(lambda number: number == 11, 0.0, id="not in plain steps"),
        pytest.param(lambda number: False, 0.0, id="never"),
    ],
)
def test_where_steps_differ_all_are_compared_with_sums_in_a_fixed_order(
    stray_steps: Callable[[int], bool], kernel_noise: float
) -> None:
    model = Straying(stray_steps)
    race = Race(model, model.loss, [], keep_gradients=False)
    race.enter("plain", contextlib.nullcontext)
    race.enter("plain again", contextlib.nullcontext)
    race.enter("wrong", model.wrong)
    race.compare_gradients(num_repeats=2)
    assert race.kernel_noise == kernel_noise
    assert race.gradient_noise == 0.0
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    race.run_rounds(1, steps_per_round=1)
    assert [row.gradient_error for row in race.rows()] == [0.0, 0.0, 0.125]


@pytest.mark.parametrize("has_fixed_order", [True, False])
def test_where_an_op_has_no_fixed_order_torch_is_only_to_warn(
    has_fixed_order: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def step() -> None:
        if not has_fixed_order:
            raise RuntimeError("some_op does not have a deterministic implementation")

    with sums_in_a_fixed_order(step):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() is not has_fixed_order
    assert not torch.are_deterministic_algorithms_enabled()
    assert ("some_op" in capsys.readouterr().out) is not has_fixed_order


def test_each_budget_is_compiled_ahead_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command[2:])
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr("frontier_compiled.subprocess.run", run)
    options = argparse.Namespace(budget=None, budget_seconds=7.0, small=True, ahead=1)
    compile_ahead("unet", options)
    as_told = ["unet", "--compiled", "--rounds", "1", "--steps", "1", "--budget-seconds", "7.0", "--small", "--budget"]
    assert commands == [[*as_told, budget] for budget in ("1.0", "0.7", "0.5", "0.3", "0.1")]


def test_time_limits_reach_through_handlers_of_exceptions() -> None:
    def sleep_through_exceptions() -> None:
        with time_limit(0.05), contextlib.suppress(Exception):
            time.sleep(10)

    with pytest.raises(TimeLimitError, match=r"longer than 0\.05 s"):
        sleep_through_exceptions()


def test_the_switch_of_transformers_leaves_the_model_as_it_was() -> None:
    model = SUBJECTS["llama-2048"](torch.device("cpu"), small=True).model
    layer = model.model.layers[0]
    with transformers_switch(model):
        assert layer.gradient_checkpointing
    assert not layer.gradient_checkpointing
    assert len(model.get_input_embeddings()._forward_hooks) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets threads be pinned one by one")
def test_threads_are_pinned_while_a_gpu_is_measured_and_released_even_after_an_error() -> None:
    before = os.sched_getaffinity(0)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert thread.native_id is not None

    def fail() -> None:
        with pinned(torch.device("cuda")):
            assert len(os.sched_getaffinity(0)) == 1
            assert len(os.sched_getaffinity(thread.native_id)) == 1
            raise ValueError("inside")

    try:
        with pytest.raises(ValueError, match="inside"):
            fail()
        assert os.sched_getaffinity(0) == os.sched_getaffinity(thread.native_id) == before
        with pinned(torch.device("cpu")):
            assert os.sched_getaffinity(0) == before
    finally:
        ended.set()
