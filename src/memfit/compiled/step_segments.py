"""Memory and time of a training step between the borders of its compiled blocks.

A border is where the forward or the backward pass of a block begins or ends. Nothing is modelled: what is live at a
border, the peak between two borders and the seconds between them are measured in the step itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from memfit.capture.measuring.clocks import moments_on
from memfit.graph.compiled_data.compiled_blocks import SegmentKind
from memfit.runtime.allocation_meter import AllocationMeter
from memfit.runtime.compiling.graph_variants import GraphVariants
from memfit.runtime.compiling.planned_blocks import BlockObserver


class CudaMemoryMeter:
    """The statistics of CUDA's allocator, for the whole device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def live_bytes(self) -> int:
        """What is allocated now."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated since the beginning or the last `restart_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def restart_peak(self) -> None:
        """Let the peak be what is allocated now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def __enter__(self) -> CudaMemoryMeter:
        torch.cuda.synchronize(self._device)
        self.restart_peak()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self._device)


MemoryMeter: TypeAlias = CudaMemoryMeter | AllocationMeter


def memory_meter_on(device: torch.device, held: Iterable[Tensor]) -> MemoryMeter:
    """Return the meter for ``device``; on a CPU, the tensors in ``held`` count from the beginning."""
    return CudaMemoryMeter(device) if device.type == "cuda" else AllocationMeter(held)


class Border(NamedTuple):
    """The beginning of a segment: what it is of, and what is live then. The peak is the segment's."""

    kind: SegmentKind
    path: str | None
    live_bytes: int
    peak_bytes: int


class _Borders(BlockObserver):
    """Notes the borders of a step."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self.graphs: dict[str, list[GraphVariants]] = {}
        self.called_again: set[str] = set()
        self._begun: set[str] = set()
        self._backward_path: str | None = None
        self._hooks: list[Any] = []

    def note(self, kind: SegmentKind, path: str | None) -> None:
        """A segment begins."""
        raise NotImplementedError

    def forward_begins(self, path: str) -> None:
        """The block's forward pass begins."""
        if path in self._begun:
            self.called_again.add(path)
        self._begun.add(path)
        self.note(SegmentKind.FORWARD, path)

    def forward_ended(self, path: str, graphs: Sequence[GraphVariants], nodes: Sequence[Any]) -> None:
        """The block's forward pass is over."""
        self.graphs.setdefault(path, []).extend(graphs)
        self.note(SegmentKind.OUTSIDE, None)

        def begin(gradients: object) -> None:
            self._begun.discard(path)
            self._backward_path = path
            self.note(SegmentKind.BACKWARD, path)

        def end(gradients: object) -> None:
            if self._backward_path == path:
                self._backward_path = None
                self.note(SegmentKind.OUTSIDE, None)

        # A hook behind the node would keep the gradients that come into it alive while it runs. So its pass is over
        # when the first node after it begins.
        for node in nodes:
            self._hooks.append(node.register_prehook(begin))
            following = dict.fromkeys(after for after, _ in node.next_functions if after is not None)
            self._hooks += [after.register_prehook(end) for after in following]

    def failed(self, path: str, reason: str) -> None:
        """The block could not be compiled, and runs in eager."""
        self.failures.setdefault(path, reason)
        self.note(SegmentKind.OUTSIDE, None)

    def close(self) -> None:
        """Take the hooks off: they refer to the step's graph, and DDP keeps nodes of parameters for all steps."""
        while self._hooks:
            self._hooks.pop().remove()


def _places_in(addresses: Sequence[int], known: Set[int]) -> frozenset[int]:
    return frozenset(place for place, address in enumerate(addresses) if address in known)


class MemoryBorders(_Borders):
    """The memory at the borders of one step, and the sizes of what blocks save."""

    notes_saves = True

    def __init__(self, meter: MemoryMeter) -> None:
        super().__init__()
        self.borders: list[Border] = []
        self.saved_sizes: dict[str, tuple[int, ...]] = {}
        self.output_bytes: dict[str, int] = {}
        self.saved_outputs: dict[str, frozenset[int]] = {}
        self.kept_inputs: dict[str, frozenset[int]] = {}
        self._saved_before: set[int] = set()
        self._output_addresses: Sequence[int] = ()
        self._meter = meter
        self._segments: list[tuple[SegmentKind, str | None, int]] = []
        self._peaks: list[int] = []
        self.note(SegmentKind.OUTSIDE, None)

    def note(self, kind: SegmentKind, path: str | None) -> None:
        """A segment begins."""
        if self._segments:
            self._peaks.append(self._meter.peak_bytes)
        self._segments.append((kind, path, self._meter.live_bytes))
        self._meter.restart_peak()

    def saved(self, path: str, saves: Mapping[int, int], inputs: Set[int], outputs: Sequence[int]) -> None:
        """The block's forward pass saved storages, some of its inputs or outputs among them."""
        # What blocks before it saved leaves with these blocks.
        self.saved_sizes[path] = tuple(saves[address] for address in saves if address not in self._saved_before)
        self._saved_before.update(saves)
        self.output_bytes[path] = sum(saves[address] for address in saves.keys() & set(outputs))
        self.saved_outputs[path] = _places_in(outputs, saves.keys())
        if not inputs.isdisjoint(self._output_addresses):
            self.kept_inputs[path] = _places_in(self._output_addresses, saves.keys() & inputs)
        self._output_addresses = outputs

    def close(self) -> None:
        """Have the borders of the step, which is over."""
        peaks = [*self._peaks, self._meter.peak_bytes]
        super().close()
        self.borders = [Border(*begun, peak) for begun, peak in zip(self._segments, peaks, strict=True)]


class TimedSegment(NamedTuple):
    """The seconds of a segment, and the block that it is of."""

    path: str | None
    seconds: float


class TimeBorders(_Borders):
    """The moments of the borders of one step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._events = moments_on(device) if device.type == "cuda" else None
        self._paths: list[str | None] = []
        self._moments: list[float] = []
        self.note(SegmentKind.OUTSIDE, None)

    def note(self, kind: SegmentKind, path: str | None) -> None:
        """A segment begins."""
        self._paths.append(path)
        if self._events is not None:
            self._events.mark()
        else:
            self._moments.append(time.perf_counter())

    def segments(self) -> list[TimedSegment]:
        """Return the segments of the step, which is over."""
        self.note(SegmentKind.OUTSIDE, None)
        self.close()
        if self._events is not None:
            seconds = self._events.seconds_between()
        else:
            seconds = [end - begin for begin, end in zip(self._moments[:-1], self._moments[1:], strict=True)]
        return [TimedSegment(*both) for both in zip(self._paths[:-1], seconds, strict=True)]
