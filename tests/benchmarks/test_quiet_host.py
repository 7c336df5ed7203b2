"""Quiet moments: a core that somebody else uses is told from one that is quiet, and threads are put back."""

from __future__ import annotations

import math
import os

import pytest
from quiet_host import QuietHost


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
    quiet = QuietHost(host.work)
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

    assert QuietHost(work).look() == pytest.approx(1e-3)


def test_how_often_somebody_is_there_is_told_by_looks_at_all_cores(host: Host) -> None:
    before = os.sched_getaffinity(0)
    num_done = 0

    def work() -> None:
        nonlocal num_done
        num_done += 1
        host.now += 1.7e-3 if num_done > 300 else 1e-3

    # Five samples in each look, of which three tell.
    assert QuietHost(work).disturbed_share(num_looks=80) == 20 / 80
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(("limit_seconds", "waited_seconds"), [(math.inf, 0.5), (0.1, 0.1)])
def test_quiet_cores_are_looked_for_for_a_while_and_threads_are_put_back_even_after_an_error(
    limit_seconds: float, waited_seconds: float, host: Host
) -> None:
    before = os.sched_getaffinity(0)
    quiet = QuietHost(host.work)
    with quiet.two_cores():
        assert host.now < 0.1
    host.seconds_of_work = 1.7e-3
    begin = host.now

    def fail() -> None:
        with quiet.two_cores(begin + limit_seconds):
            assert len(os.sched_getaffinity(0)) == 1
            raise ValueError("from within")

    with pytest.raises(ValueError, match="from within"):
        fail()
    assert waited_seconds <= host.now - begin < waited_seconds + 0.05
    assert os.sched_getaffinity(0) == before
