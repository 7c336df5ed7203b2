"""Measures the link between the device and the host's memory, over which offloaded values are copied twice.

Copies go through pinned memory, as the engine's do, and in one direction at a time: the engine waits for all copies
to the host before the forward pass ends, and fetches nothing before the backward pass. They are timed while ops run
that are bound by the device's memory, and alone; so are those ops, since each takes bandwidth of the other. In a
training step, copies overlap with such ops and with others, so that the mean of the two times counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from memfit.capture.measuring.host_memory import free_host_bytes
from memfit.graph.model_profile import Link
from memfit.runtime.engine.native_tape import new_offloading
from memfit.runtime.engine.planned_modules import Place
from memfit.runtime.torch_internals import keep_gpu_busy

# Of copies this large, the bytes are what takes time.
_LARGE_BYTES = 64 * 2**20
# Of copies this small, what each copy takes by itself is seen.
_SMALL_BYTES = 2**20
_NUM_COPIES = 9
# Ops on so many bytes, as many as take about as long as the copies on today's GPUs. Matrix products would leave a
# workspace behind.
_COMPUTED_BYTES, _NUM_OPS = 256 * 2**20, 100
_NUM_ROUNDS = 5
# About 5 ms: in less than that, all copies of one measurement are launched, and then run back to back.
_PAUSE_CYCLES = 10_000_000


class CopySeconds(NamedTuple):
    """How long a copy of ``_LARGE_BYTES`` takes in a training step, and one of ``_SMALL_BYTES``.

    ``slowdown`` is the share of the large copies' time by which they make the computing longer.
    """

    large: float
    small: float
    slowdown: float = 0.0


def measured_link(device: torch.device) -> Link | None:
    """Return how long copies from ``device`` to the host's memory and back take, and how much memory is free there.

    None where the device is not a CUDA device, or has no room for 384 MiB, or the host does not let 128 MiB be pinned:
    a profile is useful without it. torch keeps pinned memory for later use.
    """
    if device.type != "cuda":
        return None
    host_free_bytes = free_host_bytes()
    try:
        with torch.cuda.device(device):
            out = _Lane(target=_pinned(), source=_on_device(device), stream=torch.cuda.Stream(device))
            back = _Lane(target=_on_device(device), source=_pinned(), stream=torch.cuda.Stream(device))
            computing = _Computing(device)
            out_seconds, back_seconds = (_seconds_of_copies(lane, computing) for lane in (out, back))
            link = link_of(out_seconds, back_seconds, host_free_bytes)
            return link and replace(link, host_seconds=_host_seconds(device))
    except RuntimeError:
        return None


def link_of(out: CopySeconds, back: CopySeconds, host_free_bytes: int) -> Link | None:
    """Return the link on which copies take so long; None where the times do not determine it.

    A copy takes the same time for itself however large it is: what large ones take beyond small ones is their bytes'.
    """
    if not (0 < out.small < out.large and 0 < back.small < back.large):
        return None
    out_rate, back_rate = ((_LARGE_BYTES - _SMALL_BYTES) / (copy.large - copy.small) for copy in (out, back))
    return Link(
        out_rate,
        back_rate,
        seconds_per_copy=max(out.small - _SMALL_BYTES / out_rate, back.small - _SMALL_BYTES / back_rate, 0.0),
        host_free_bytes=host_free_bytes,
        slowdown=max(out.slowdown, back.slowdown, 0.0),
    )


@dataclass(frozen=True, slots=True)
class _Lane:
    """Copies in one direction, on a stream of their own."""

    target: Tensor
    source: Tensor
    stream: torch.cuda.Stream

    def launch(self, num_bytes: int, start: torch.cuda.Event) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Launch copies that begin at ``start``, and return the events before and after them."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(start)
            begin.record()
            for _ in range(_NUM_COPIES):
                self.target[:num_bytes].copy_(self.source[:num_bytes], non_blocking=True)
            end.record()
        return begin, end


class _Computing:
    """Something beside which to copy."""

    def __init__(self, device: torch.device) -> None:
        self._operand = torch.zeros(_COMPUTED_BYTES, dtype=torch.uint8, device=device).view(torch.float32)

    def launch(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Launch the ops, and return the events before and after them."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_NUM_OPS):
            self._operand.mul_(2.0)
        end.record()
        return begin, end


def _seconds_of_copies(lane: _Lane, computing: _Computing) -> CopySeconds:
    """Return how long copies of both sizes take, and what they take of the computing beside them."""
    sizes = (_LARGE_BYTES, _SMALL_BYTES)
    copies: dict[tuple[int, bool], list[float]] = {case: [] for case in product(sizes, (True, False))}
    alone, beside = [], []
    # The first round warms up.
    for number in range(_NUM_ROUNDS + 1):
        seconds = {case: _seconds(lane, case[0], computing if case[1] else None) for case in copies}
        without = _seconds(None, 0, computing).computing
        if number:
            for case, taken in seconds.items():
                copies[case].append(taken.copy)
            alone.append(without)
            beside.append(seconds[_LARGE_BYTES, True].computing)
    large, small = ((median(copies[size, True]) + median(copies[size, False])) / 2 for size in sizes)
    copying = min(_NUM_COPIES * large, median(beside))
    return CopySeconds(large, small, slowdown=(median(beside) - median(alone)) / copying)


class _Taken(NamedTuple):
    """How long each copy took, and the computing."""

    copy: float
    computing: float


def _seconds(lane: _Lane | None, num_bytes: int, computing: _Computing | None) -> _Taken:
    """Return how long copies of this size and the computing take at the same time, or one of them alone."""
    start = torch.cuda.Event()
    keep_gpu_busy(_PAUSE_CYCLES)
    start.record()
    copies = None if lane is None else lane.launch(num_bytes, start)
    ops = None if computing is None else computing.launch()
    return _Taken(_seconds_between(copies) / _NUM_COPIES, _seconds_between(ops))


def _seconds_between(events: tuple[torch.cuda.Event, torch.cuda.Event] | None) -> float:
    if events is None:
        return 0.0
    begin, end = events
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _host_seconds(device: torch.device) -> float:
    """Return what the host usually spends on one value, with the engine that runs plans here."""
    values = [torch.empty(_SMALL_BYTES, dtype=torch.uint8, device=device) for _ in range(_NUM_COPIES)]
    place = Place("", nn.Identity())
    rounds = []
    for _ in range(_NUM_ROUNDS + 1):
        torch.cuda.synchronize(device)
        offloading = new_offloading()
        begin = time.perf_counter()
        copies = [offloading.send(value, 0, place, "", _SMALL_BYTES) for value in values]
        offloading.end_forward()
        for copy in reversed(copies):
            offloading.fetch_ahead()
            if copy is not None:
                copy.fetch()
        rounds.append(time.perf_counter() - begin)
    # The first round warms up.
    return median(rounds[1:]) / _NUM_COPIES


def _pinned() -> Tensor:
    return torch.empty(_LARGE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)


def _on_device(device: torch.device) -> Tensor:
    return torch.empty(_LARGE_BYTES, dtype=torch.uint8, device=device)
