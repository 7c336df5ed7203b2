"""The peak of every training step, by the allocator's own events."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memfit.distributed.local_tensors import local_tensor
from memfit.runtime.allocation_meter import AllocationMeter


class StepPeaks:
    """Counts what a loop allocates from `begin` on, beside what there is then; ``peaks`` has the peak of each step."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self._meter: AllocationMeter | None = None

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        held: list[Tensor] = [*model.parameters(), *model.buffers()]
        held += [entry for state in optimizer.state.values() for entry in state.values() if torch.is_tensor(entry)]
        # Of DTensors, what this process holds.
        self._meter = AllocationMeter([local_tensor(tensor) for tensor in held])
        self._meter.__enter__()

    def end_step(self) -> None:
        assert self._meter is not None
        self.peaks.append(self._meter.peak_bytes)
        self._meter.restart_peak()

    def leave_out(self) -> None:
        """Leave out what ran since the last step, such as an evaluation."""
        assert self._meter is not None
        self._meter.restart_peak()

    def end(self) -> None:
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self._meter = None
