"""Other cores: each thread leaves the one it was on, and all may run where they might before, whatever happens."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from memfit.capture import other_cores as module
from memfit.capture.other_cores import other_cores


class Scheduler:
    """A host of four cores; what each thread is allowed, and which core it is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed = {1: {0, 1, 2, 3}, 2: {0, 1, 2, 3}, 3: {2}}
        self.last = {1: {0}, 2: {3}, 3: {2}, 4: {1}}
        self.refused: set[int] = set()
        monkeypatch.setattr(module, "_threads", lambda: list(self.allowed))
        monkeypatch.setattr(module, "_last_cores", lambda thread: self.last.get(thread, set()))
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(self.allowed[thread]), raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", self._set, raising=False)

    def _set(self, thread: int, cores: set[int]) -> None:
        if thread in self.refused:
            raise PermissionError(thread)
        assert cores
        self.allowed[thread] = set(cores)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    return Scheduler(monkeypatch)


def test_each_thread_leaves_its_core_if_it_has_others(scheduler: Scheduler) -> None:
    before = dict(scheduler.allowed)
    with other_cores():
        assert scheduler.allowed == {1: {1, 2, 3}, 2: {0, 1, 2}, 3: {2}}
    assert scheduler.allowed == before


def test_all_may_run_where_they_might_after_an_error_and_new_threads_where_their_parent_might(
    scheduler: Scheduler,
) -> None:
    def fail() -> None:
        with other_cores():
            # One that began meanwhile, and one that put itself on a core; one that ended.
            scheduler.allowed[4] = set(scheduler.allowed[1])
            scheduler.allowed[5] = {1}
            del scheduler.allowed[2]
            raise ValueError("from within")

    with pytest.raises(ValueError, match="from within"):
        fail()
    assert scheduler.allowed == {1: {0, 1, 2, 3}, 3: {2}, 4: {0, 1, 2, 3}, 5: {1}}


def test_where_it_is_not_allowed_or_not_told_nothing_happens(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(scheduler.allowed)
    scheduler.refused = {1}
    scheduler.last = {1: {0}}
    with other_cores():
        assert scheduler.allowed == before
    monkeypatch.delattr(os, "sched_setaffinity")
    with other_cores():
        assert scheduler.allowed == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux tells which core a thread is on")
def test_on_this_host_a_thread_is_somewhere_else() -> None:
    before = os.sched_getaffinity(0)
    here = module._last_cores(threading.get_native_id())
    assert len(here) == 1
    assert here <= before
    with other_cores():
        if len(before) > 1:
            assert len(os.sched_getaffinity(0)) == len(before) - 1
    assert os.sched_getaffinity(0) == before
