"""Quiet moments: a core that somebody else uses is told from one that is quiet, and threads are put back."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
from quiet_host import QuietHost, cores_apart


class Host:
    """A host whose clock is advanced by the work itself, by as much as its speed just then says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds_of_work = 1e-3

    def work(self) -> None:
        self.now += self.seconds_of_work


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr("quiet_host.time.perf_counter", lambda: host.now)
    return host


@pytest.mark.parametrize(
    ("seconds_of_work", "is_quiet"),
    [
        pytest.param(1e-3, True, id="as ever"),
        pytest.param(1.2e-3, True, id="hardly slower"),
        pytest.param(1.7e-3, False, id="disturbed"),
    ],
)
def test_work_that_takes_far_longer_than_it_ever_did_tells_that_somebody_is_there(
    seconds_of_work: float, is_quiet: bool, host: Host
) -> None:
    quiet = QuietHost(work=host.work)
    assert quiet.is_quiet(quiet.look())
    host.seconds_of_work = seconds_of_work
    assert quiet.is_quiet(quiet.look()) is is_quiet
    host.seconds_of_work = 0.5e-3
    assert quiet.is_quiet(quiet.look())
    host.seconds_of_work = 1e-3
    assert not quiet.is_quiet(quiet.look())
    assert quiet.least_seconds == pytest.approx(0.5e-3)


def test_one_bad_sample_tells_nothing(host: Host) -> None:
    samples = iter([1e-3, 9e-3, 1e-3, 1e-3, 9e-3])

    def work() -> None:
        host.now += next(samples)

    assert QuietHost(work=work).look() == pytest.approx(1e-3)


def test_how_often_somebody_is_there_is_told_by_looks_for_a_while(host: Host) -> None:
    def work() -> None:
        host.now += 1.7e-3 if host.now > 0.75 else 1e-3

    share = QuietHost(work=work).disturbed_share(seconds=1.0)
    # Each look takes five times the work; 150 of those before, and 30 in the slow quarter of a second.
    assert share == pytest.approx(30 / 180, abs=0.01)


def processes_of(parent: int) -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()}


def test_all_threads_are_on_one_core_that_is_kept_awake_and_put_back_even_after_an_error() -> None:
    before, processes = os.sched_getaffinity(0), processes_of(os.getpid())
    quiet = QuietHost()
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()

    def fail() -> None:
        with quiet.held():
            awake = processes_of(os.getpid()) - processes
            assert len(awake) == min(len(before), 3)
            (core,) = os.sched_getaffinity(0)
            assert core in before
            assert thread.native_id is not None
            assert os.sched_getaffinity(thread.native_id) == {core}
            quiet.settle()
            assert len(os.sched_getaffinity(0)) == 1
            raise ValueError("from within")

    try:
        with pytest.raises(ValueError, match="from within"):
            fail()
        assert thread.native_id is not None
        assert os.sched_getaffinity(0) == os.sched_getaffinity(thread.native_id) == before
    finally:
        ended.set()
    assert processes_of(os.getpid()) == processes


class Cores:
    """Four cores of different speed, and where this thread and another one are put."""

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = {0: 0.98e-3, 1: 0.99e-3, 2: 1e-3, 3: 1.01e-3}
        self.of_thread = {0: {0}, 7: {0}}
        self._host = host
        monkeypatch.setattr("os.sched_getaffinity", lambda thread: {0, 1, 2, 3})
        monkeypatch.setattr("os.sched_setaffinity", self.of_thread.__setitem__)
        monkeypatch.setattr("quiet_host._kept_awake", lambda core: contextlib.nullcontext())
        monkeypatch.setattr("quiet_host._threads", lambda: iter([0, 7]))

    def work(self) -> None:
        (core,) = self.of_thread[0]
        self._host.now += self.seconds[core]


def test_disturbed_cores_are_left_for_the_quietest_and_quiet_ones_are_not(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = Cores(host, monkeypatch)
    quiet = QuietHost(2, work=cores.work)
    with quiet.held():
        assert cores.of_thread == {0: {0}, 7: {1}}
        cores.seconds |= {0: 1.2e-3, 2: 0.985e-3}
        quiet.settle()
        assert cores.of_thread == {0: {0}, 7: {1}}
        cores.seconds |= {1: 1.9e-3}
        quiet.settle()
        assert cores.of_thread == {0: {2}, 7: {3}}
    assert cores.of_thread == {0: {0, 1, 2, 3}, 7: {0, 1, 2, 3}}


def test_on_one_core_all_threads_are_together(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores(host, monkeypatch)
    quiet = QuietHost(work=cores.work)
    with quiet.held():
        assert cores.of_thread == {0: {0}, 7: {0}}
        # The first three cores are those to choose from.
        cores.seconds |= {0: 1.9e-3, 3: 0.9e-3}
        quiet.settle()
        assert cores.of_thread == {0: {1}, 7: {1}}


@pytest.mark.parametrize("num_cores", [16, 32, 15])
@pytest.mark.parametrize("number", [3, 4])
def test_no_two_cores_that_are_kept_awake_are_threads_of_one(num_cores: int, number: int) -> None:
    chosen = cores_apart(range(num_cores), number)
    assert len(set(chosen)) == len(chosen) == number
    in_turns = [core // 2 for core in chosen]
    all_first_ones_first = [core % -(-num_cores // 2) for core in chosen]
    assert len(set(in_turns)) == len(set(all_first_ones_first)) == number


def test_a_host_of_few_cores_has_all_of_them_to_choose_from() -> None:
    assert list(cores_apart([4, 5, 6, 7], 4)) == [4, 5, 6, 7]
    assert list(cores_apart([1], 3)) == [1]
