"""Goes into the regions of a forward pass, one inside the other, and lets a tape listen there as the plan needs it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from memfit.runtime.regions import Region
from memfit.runtime.torch_internals import PackHook, UnpackHook, outer_saved_tensors_hooks

_NOTHING = nullcontext()


class RegionWalk:
    """The regions of one forward pass under way. `run` runs each region; `close` ends the pass.

    ``pack`` and ``unpack`` are called for what autograd saves in watched regions. The tape says how ops are heard.
    """

    def __init__(self, pack: PackHook, unpack: UnpackHook) -> None:
        self.report: Callable[[bool], None] | None = None
        self._region: Region | None = None
        self._is_recording = False
        self._is_watching = False
        self._outer_hooks = outer_saved_tensors_hooks()
        self._hooks = (pack, unpack)
        self._watch = torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def run(self, region: Region, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` as part of ``region``, which may lie inside another: record there, or watch, or both.

        Saved-tensor hooks that the model itself put around the region (torch.utils.checkpoint does) have the say there,
        and the tape steps aside.
        """
        if outer_saved_tensors_hooks() != (self._hooks if self._is_watching else self._outer_hooks):
            return forward(*args, **kwargs)
        before = self._region, self._is_watching, self._is_recording
        watches, records = region.watches and not self._is_watching, region.records and not self._is_recording
        # What is only watched has no say in what the region around it records.
        if region.records or self._region is None:
            self._region = region
        self._is_watching |= region.watches
        self._is_recording |= region.records
        try:
            with self._watch if watches else _NOTHING, self._recording() if records else _NOTHING:
                return forward(*args, **kwargs)
        finally:
            self._region, self._is_watching, self._is_recording = before

    def close(self, *, is_complete: bool = True) -> None:
        """End the pass, which an exception may have ended early: nothing more will be heard."""
        if is_complete and self.report is not None:
            self.report(self._has_heard_what_was_planned())
        self.report = None
        # They refer to the tape in turn, and nobody should have to wait for the garbage collector.
        del self._hooks, self._watch

    def _recording(self) -> AbstractContextManager[object]:
        """Return what lets the tape hear the ops that run inside it."""
        raise NotImplementedError

    def _has_heard_what_was_planned(self) -> bool:
        raise NotImplementedError
