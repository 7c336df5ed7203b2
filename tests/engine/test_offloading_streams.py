"""Who waits for whom when values leave and come back: on streams that only take notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfit.errors import StaleValueError
from memfit.runtime import offloading
from memfit.runtime.offloading import OffloadedCopy, Offloading
from memfit.runtime.regions import Place

VALUE_BYTES = 40
CPU = torch.device("cpu")
NAMES = ("main", "out", "back", "other")


class NotedStreams:
    """The streams of one device: ``notes`` tells what was launched on them, in the host's order."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.num_copies = 0
        self.main, self.out, self.back, self.other = (NotedStream(self, name) for name in NAMES)
        self.current = self.main

    def since(self) -> list[str]:
        """Return the notes since they were last asked for."""
        notes, self.notes = self.notes, []
        return notes


class NotedStream:
    def __init__(self, streams: NotedStreams, name: str) -> None:
        self.streams, self.name, self.device = streams, name, CPU

    def wait_stream(self, other: NotedStream) -> None:
        self.streams.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: NotedEvent) -> None:
        self.streams.notes.append(f"{self.name} waits for {event.name}")


class NotedEvent:
    name = ""

    def record(self, stream: NotedStream) -> None:
        self.name = f"copy {stream.streams.num_copies} {stream.name}"
        stream.streams.num_copies += 1
        stream.streams.notes.append(self.name)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> NotedStreams:
    noted = NotedStreams()

    @contextmanager
    def on(stream: NotedStream) -> Iterator[None]:
        before, noted.current = noted.current, stream
        yield
        noted.current = before

    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: noted.current)
    monkeypatch.setattr(torch.cuda, "Event", NotedEvent)
    monkeypatch.setattr(offloading, "_streams_for", lambda _: offloading._Streams(noted.current, noted.out, noted.back))
    return noted


def value(number: int) -> Tensor:
    return torch.full((VALUE_BYTES // 4,), float(number))


def sent(passes: Offloading, tensor: Tensor, window_values: int) -> OffloadedCopy:
    place = Place("blocks.0", nn.Identity())
    copy = passes.send(tensor, tensor._version, place, "aten.gelu", window_values * VALUE_BYTES)
    assert copy is not None
    return copy


def content(copy: OffloadedCopy) -> list[float]:
    return copy.fetch().view(torch.float32).tolist()


def test_memory_is_let_go_of_after_the_copy_and_filled_after_what_used_it(streams: NotedStreams) -> None:
    passes = Offloading()
    copy = sent(passes, value(3), window_values=0)
    assert streams.since() == ["out waits for main", "copy 0 out", "main waits for copy 0 out"]
    assert content(copy) == value(3).tolist()
    assert streams.since() == [
        "main waits for copy 0 out",
        "back waits for main",
        "copy 1 back",
        "main waits for copy 1 back",
    ]
    del copy
    assert streams.since() == []


def test_the_computation_waits_for_what_the_window_has_no_room_for(streams: NotedStreams) -> None:
    passes = Offloading()
    copies = [sent(passes, value(number), window_values=2) for number in range(4)]
    waits = [note for note in streams.since() if note.startswith("main")]
    assert waits == ["main waits for copy 0 out", "main waits for copy 1 out"]
    passes.end_forward()
    assert streams.since() == ["main waits for copy 2 out", "main waits for copy 3 out"]
    passes.end_forward()
    assert streams.since() == []
    assert len(copies) == 4


def started(notes: list[str]) -> list[str]:
    return [note for note in notes if note.endswith("back") and note.startswith("copy")]


def test_the_latest_are_fetched_ahead_as_far_as_the_window_goes(streams: NotedStreams) -> None:
    passes = Offloading()
    copies: list[OffloadedCopy | None] = [sent(passes, value(number), window_values=2) for number in range(6)]
    passes.end_forward()
    streams.since()
    passes.fetch_ahead()
    assert started(streams.since()) == ["copy 6 back", "copy 7 back"]
    # There is no room until one of them is read, nor does what is read out of turn make any.
    passes.fetch_ahead()
    early = copies[0]
    assert early is not None
    assert content(early) == value(0).tolist()
    passes.fetch_ahead()
    assert started(streams.since()) == ["copy 8 back"]
    last = copies[5]
    assert last is not None
    assert content(last) == value(5).tolist()
    assert streams.since() == ["main waits for copy 6 back"]
    # The next one is given up, and another that waits to be started: it is the turn of the one before that.
    copies[4] = copies[3] = None
    assert streams.since() == ["main waits for copy 7 back"]
    passes.fetch_ahead()
    assert started(streams.since()) == ["copy 9 back", "copy 10 back"]
    assert [content(copy) for copy in copies[1:3] if copy is not None] == [value(1).tolist(), value(2).tolist()]


def test_what_is_given_up_on_its_way_back_is_waited_for(streams: NotedStreams) -> None:
    passes = Offloading()
    copy = sent(passes, value(0), window_values=1)
    passes.end_forward()
    passes.fetch_ahead()
    streams.since()
    del copy
    assert streams.since() == ["main waits for copy 1 back"]


def test_what_is_given_up_on_its_way_out_is_waited_for(streams: NotedStreams) -> None:
    passes = Offloading()
    copy = sent(passes, value(0), window_values=1)
    streams.since()
    del passes, copy
    assert streams.since() == ["main waits for copy 0 out"]


def test_another_stream_that_reads_waits_too_and_the_memory_is_the_first_ones(streams: NotedStreams) -> None:
    passes = Offloading()
    copy = sent(passes, value(0), window_values=0)
    streams.since()
    streams.current = streams.other
    copy.fetch()
    assert streams.since() == [
        "main waits for copy 0 out",
        "other waits for copy 0 out",
        "back waits for main",
        "copy 1 back",
        "main waits for copy 1 back",
        "other waits for copy 1 back",
    ]


def test_a_write_waits_for_the_copy_and_one_that_was_not_heard_tears_it(streams: NotedStreams) -> None:
    passes = Offloading()
    heard, unheard = value(0), value(1)
    copies = [sent(passes, tensor, window_values=2) for tensor in (heard, unheard)]
    streams.since()
    copies[0].before_write(num_counted=0)
    assert streams.since() == ["main waits for copy 0 out"]
    heard.add_(1)
    unheard.add_(1)
    passes.end_forward()
    assert content(copies[0]) == value(0).tolist()
    with pytest.raises(StaleValueError, match=r"blocks\.0::aten\.gelu .* \(version 1, was 0\)"):
        copies[1].fetch()


def test_a_write_that_is_counted_before_it_is_heard(streams: NotedStreams) -> None:
    passes = Offloading()
    once, twice = value(0), value(1)
    copies = [sent(passes, tensor, window_values=2) for tensor in (once, twice)]
    for tensor, copy, num_writes in zip((once, twice), copies, (1, 2), strict=True):
        for _ in range(num_writes):
            torch.autograd.graph.increment_version(tensor)
        copy.before_write(num_counted=1)
    passes.end_forward()
    assert content(copies[0]) == value(0).tolist()
    with pytest.raises(StaleValueError, match="version 2, was 0"):
        copies[1].fetch()


def test_a_host_without_room_is_named_in_the_error(streams: NotedStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def full(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    passes, tensor = Offloading(), value(0)
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        sent(passes, tensor, window_values=1)
    assert caught.value.__notes__ == [
        "memfit was about to offload 40 bytes to the host's memory, which could not be had. A plan for a smaller "
        "host_budget takes less of it"
    ]
