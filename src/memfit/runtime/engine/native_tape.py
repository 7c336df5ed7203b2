"""The tape in C++ (``native/``) behind the interface of the one in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfit.runtime.engine.event_log import log_event
from memfit.runtime.engine.forward_pass import ForwardPass, UnplannedCalls
from memfit.runtime.engine.offloading import HostCopies
from memfit.runtime.engine.planned_modules import PlannedModule
from memfit.runtime.engine.tape import Tape
from memfit.runtime.fusing.fusing import can_fuse_on
from memfit.runtime.native import native_library
from memfit.runtime.torch_internals import outer_saved_tensors_hooks


def new_tape() -> ForwardPass:
    """Return a tape for one forward pass: in C++ if it is available and no other tape records in this thread."""
    native = native_library.configured_module()
    # With saved-tensor hooks around the model, kept tensors must pass them, which only the tape in Python does.
    if native is None or outer_saved_tensors_hooks() is not None or native.is_recording():
        return Tape()
    return NativeTape(native)


def new_offloading() -> HostCopies:
    """Return the offloading of one forward pass by itself, without a tape."""
    native = native_library.configured_module()
    offloading: HostCopies = HostCopies() if native is None else native.Offloading()
    return offloading


def fuses_on(device: torch.device) -> bool:
    """Return whether pointwise ops that are replayed on ``device`` run in one kernel."""
    return can_fuse_on(device.type) and native_library.configured_module() is not None


def engine_name() -> str:
    """Return which engine runs plans here: "C++" or "Python"."""
    return "Python" if native_library.configured_module() is None else "C++"


class NativeTape:
    """Records the ops of one forward pass in C++."""

    def __init__(self, native: Any) -> None:
        self.report: Callable[[UnplannedCalls | None], None] | None = None
        self._native = native
        self._pass = native.ForwardPass()

    def run(self, planned: PlannedModule, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` as a call of ``planned``."""
        return self._pass.run(_in_native_form(self._native, planned), forward, args, kwargs)

    def close(self, *, is_complete: bool = True) -> None:
        """End the pass, and drop the records of values that outlive it, such as the model's outputs."""
        report, self.report = self.report, None
        unplanned = self._pass.close()
        if is_complete:
            log_event("pass", "as planned" if unplanned is None else "not as planned")
            if report is not None:
                report(None if unplanned is None else UnplannedCalls(*unplanned))


def _in_native_form(native: Any, planned: PlannedModule) -> object:
    if planned.in_native_form is None:
        planned.in_native_form = native.PlannedModule(planned)
    return planned.in_native_form
