"""Quiet moments: what was disturbed is run again, a few times, and threads are where they were afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from quiet_host import Moment, QuietHost


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


def speeds_after_runs(host: Host, speeds: list[float]) -> Iterator[int]:
    """Yield the number of each run, and leave the host at the next of ``speeds``."""
    for number, speed in enumerate(speeds):
        host.seconds_of_work = speed
        yield number


@pytest.mark.parametrize(
    ("speeds", "moment"),
    [
        pytest.param([1e-3], Moment(0, True, 0), id="quiet"),
        pytest.param([1.2e-3], Moment(0, True, 0), id="hardly slower"),
        pytest.param([1.7e-3, 1e-3], Moment(1, True, 1), id="disturbed once"),
        pytest.param([1.7e-3] * 9, Moment(3, False, 4), id="disturbed for good"),
    ],
)
def test_what_was_disturbed_runs_again_and_the_last_try_is_told_as_it_is(
    speeds: list[float], moment: Moment[int], host: Host
) -> None:
    quiet = QuietHost(host.work)
    assert quiet.undisturbed(lambda: "to know the host's speed") == ("to know the host's speed", True, 0)
    runs = speeds_after_runs(host, speeds)
    assert quiet.undisturbed(lambda: next(runs)) == moment


def test_after_its_limit_it_is_not_run_again(host: Host) -> None:
    quiet = QuietHost(host.work)
    quiet.undisturbed(lambda: None)
    host.seconds_of_work = 1.7e-3
    runs: list[float] = []

    def run() -> None:
        runs.append(host.now)
        host.now += 2.0

    assert quiet.undisturbed(run, limit_seconds=4.0) == (None, False, 2)
    assert len(runs) == 2


def test_a_quiet_core_is_looked_for_and_threads_are_put_back_even_after_an_error(host: Host) -> None:
    before = os.sched_getaffinity(0)
    quiet = QuietHost(host.work)
    quiet.undisturbed(lambda: None)
    host.seconds_of_work = 1.7e-3

    def fail() -> None:
        assert len(os.sched_getaffinity(0)) == 1
        raise ValueError("from within")

    with pytest.raises(ValueError, match="from within"):
        quiet.undisturbed(fail)
    assert host.now >= 0.5
    assert os.sched_getaffinity(0) == before
