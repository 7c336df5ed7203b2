"""Who waits for whom when values leave and come back: on streams that only take notes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.engine.logged_streams import VALUE_BYTES, NotedStreams, StreamsOfCpp, logged_streams_of
from torch import Tensor, nn

from memfit.errors import StaleValueError
from memfit.runtime.engine.native_tape import new_offloading
from memfit.runtime.engine.offloading import HostCopies, OffloadedCopy
from memfit.runtime.engine.planned_modules import Place


@pytest.fixture
def streams(engine: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[NotedStreams]:
    with logged_streams_of(engine, monkeypatch) as noted:
        yield noted


def sent(passes: HostCopies, tensor: Tensor, window_values: int) -> OffloadedCopy:
    place = Place("blocks.0", nn.Identity())
    copy = passes.send(tensor, tensor._version, place, "aten.gelu", window_values * VALUE_BYTES)
    assert copy is not None
    return copy


def test_memory_is_let_go_of_after_the_copy_and_filled_after_what_used_it(streams: NotedStreams) -> None:
    passes = new_offloading()
    copy = sent(passes, streams.value(3), window_values=0)
    assert streams.since() == ["out waits for main", "copy 0 out", "main waits for copy 0 out"]
    assert streams.content(copy) == {3}
    assert streams.since() == [
        "main waits for copy 0 out",
        "back waits for main",
        "copy 1 back",
        "main waits for copy 1 back",
    ]
    del copy
    assert streams.since() == []


def test_the_computation_waits_for_what_the_window_has_no_room_for(streams: NotedStreams) -> None:
    passes = new_offloading()
    copies = [sent(passes, streams.value(number), window_values=2) for number in range(4)]
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
    passes = new_offloading()
    copies: list[OffloadedCopy | None] = [sent(passes, streams.value(number), window_values=2) for number in range(6)]
    passes.end_forward()
    streams.since()
    passes.fetch_ahead()
    assert started(streams.since()) == ["copy 6 back", "copy 7 back"]
    # There is no room until one of them is read, nor does what is read out of turn make any.
    passes.fetch_ahead()
    early = copies[0]
    assert early is not None
    assert streams.content(early) == {0}
    passes.fetch_ahead()
    assert started(streams.since()) == ["copy 8 back"]
    last = copies[5]
    assert last is not None
    assert streams.content(last) == {5}
    assert streams.since() == ["main waits for copy 6 back"]
    # The next one is given up, and another that waits to be started: it is the turn of the one before that.
    copies[4] = copies[3] = None
    assert streams.since() == ["main waits for copy 7 back"]
    passes.fetch_ahead()
    assert started(streams.since()) == ["copy 9 back", "copy 10 back"]
    assert [streams.content(copy) for copy in copies[1:3] if copy is not None] == [{1}, {2}]


def test_what_is_given_up_on_its_way_back_is_waited_for(streams: NotedStreams) -> None:
    passes = new_offloading()
    copy = sent(passes, streams.value(0), window_values=1)
    passes.end_forward()
    passes.fetch_ahead()
    streams.since()
    del copy
    assert streams.since() == ["main waits for copy 1 back"]


def test_what_is_given_up_on_its_way_out_is_waited_for(streams: NotedStreams) -> None:
    passes = new_offloading()
    copy = sent(passes, streams.value(0), window_values=1)
    streams.since()
    del passes, copy
    assert streams.since() == ["main waits for copy 0 out"]


def test_another_stream_that_reads_waits_too_and_the_memory_is_the_first_ones(streams: NotedStreams) -> None:
    passes = new_offloading()
    copy = sent(passes, streams.value(0), window_values=0)
    streams.since()
    streams.use("other")
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
    passes = new_offloading()
    recorded, unrecorded = streams.value(0), streams.value(1)
    copies = [sent(passes, tensor, window_values=2) for tensor in (recorded, unrecorded)]
    streams.since()
    copies[0].before_write(num_counted=0)
    assert streams.since() == ["main waits for copy 0 out"]
    streams.write(recorded)
    streams.write(unrecorded)
    passes.end_forward()
    assert streams.content(copies[0]) == {0}
    with pytest.raises(StaleValueError, match=r"blocks\.0::aten\.gelu .* \(version 1, was 0\)"):
        copies[1].fetch()


def test_a_write_that_is_counted_before_it_is_heard(streams: NotedStreams) -> None:
    passes = new_offloading()
    once, twice = streams.value(0), streams.value(1)
    copies = [sent(passes, tensor, window_values=2) for tensor in (once, twice)]
    for tensor, copy, num_writes in zip((once, twice), copies, (1, 2), strict=True):
        for _ in range(num_writes):
            torch.autograd.graph.increment_version(tensor)
        copy.before_write(num_counted=1)
    passes.end_forward()
    assert streams.content(copies[0]) == {0}
    with pytest.raises(StaleValueError, match="version 2, was 0"):
        copies[1].fetch()


def test_a_host_without_room_is_named_in_the_error(streams: NotedStreams) -> None:
    passes, tensor = new_offloading(), streams.value(0)
    streams.fill_host()
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        sent(passes, tensor, window_values=1)
    # What Python notes on an error, C++ can only put into its message.
    told = "\n".join((str(caught.value), *getattr(caught.value, "__notes__", ())))
    assert (
        "memfit was about to offload 512 bytes to the host's memory, which could not be allocated. "
        "A plan for a smaller host_budget takes less of it"
    ) in told
    assert streams.since() == []


def test_host_memory_is_pinned_and_memory_on_the_device_is_that_of_the_first_stream(streams: NotedStreams) -> None:
    passes = new_offloading()
    copies = [sent(passes, streams.value(number), window_values=1) for number in range(2)]
    assert streams.memory() == ["pinned", "pinned"]
    streams.use("other")
    passes.end_forward()
    passes.fetch_ahead()
    assert [streams.content(copy) for copy in copies] == [{0}, {1}]
    assert streams.memory() == ["main", "main"]


@pytest.fixture
def streams_of_cpp(streams: NotedStreams) -> StreamsOfCpp:
    """For what only the engine in C++ can be asked without a device: in Python it is seen to by others."""
    if not isinstance(streams, StreamsOfCpp):
        pytest.skip("about the engine in C++")
    return streams


def test_a_device_that_is_gone_ends_no_process(streams_of_cpp: StreamsOfCpp) -> None:
    """Whoever frees what is on its way can catch nothing."""
    passes = new_offloading()
    copies = [sent(passes, streams_of_cpp.value(number), window_values=1) for number in range(2)]
    passes.fetch_ahead()
    streams_of_cpp.since()
    streams_of_cpp.break_device()
    with pytest.raises(RuntimeError, match="the device is gone"):
        copies[1].fetch()
    del passes, copies
    assert streams_of_cpp.since() == []


def test_what_is_captured_stays(streams_of_cpp: StreamsOfCpp) -> None:
    streams_of_cpp.is_capturing = True
    passes, place = new_offloading(), Place("", nn.Identity())
    assert passes.send(streams_of_cpp.value(0), 0, place, "", 0) is None
    streams_of_cpp.is_capturing = False
    assert passes.send(streams_of_cpp.value(0), 0, place, "", 0) is not None
