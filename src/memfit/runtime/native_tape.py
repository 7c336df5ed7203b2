"""The tape in C++ (``native/``), as the rest of the engine sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfit.runtime import native_library
from memfit.runtime.event_log import log_event
from memfit.runtime.forward_pass import ForwardPass, Rounds
from memfit.runtime.forward_wrapping import Runner
from memfit.runtime.fusing import can_fuse_on
from memfit.runtime.offloading import HostCopies
from memfit.runtime.recorded_modules import Region
from memfit.runtime.tape import Tape
from memfit.runtime.torch_internals import outer_saved_tensors_hooks


def new_tape() -> ForwardPass:
    """Return a tape for one forward pass: the one in C++, unless there is none or somebody else listens already."""
    native = native_library.configured_module()
    # Saved-tensor hooks around the model want their share of what is kept, and only the tape in Python gives it.
    if native is None or outer_saved_tensors_hooks() is not None or native.is_listening():
        return Tape()
    return NativeTape(native)


def way_into(region: Region, owner: object, longer_way: Runner) -> Runner:
    """Return what runs a forward as part of ``region``, in C++ while a pass of ``owner`` is under way in the thread.

    All else is left to ``longer_way``, in Python.
    """
    native = native_library.configured_module()
    if native is None:
        return longer_way
    shortest: Runner = native.way_in(_in_native_form(native, region), owner, longer_way)
    return shortest


def new_offloading() -> HostCopies:
    """Return the way to the host that the values of one forward pass would take, by itself."""
    native = native_library.configured_module()
    offloading: HostCopies = HostCopies() if native is None else native.Offloading()
    return offloading


def fuses_on(device: torch.device) -> bool:
    """Return whether pointwise ops that are replayed on ``device`` run in one kernel."""
    return can_fuse_on(device.type) and native_library.configured_module() is not None


def new_rounds() -> Any:
    """Return the rounds of one planned model, as both engines count them."""
    native = native_library.configured_module()
    return Rounds() if native is None else native.Rounds()


def engine_name() -> str:
    """Return which engine runs plans here: "C++" or "Python"."""
    return "Python" if native_library.configured_module() is None else "C++"


class NativeTape:
    """Records the ops of one forward pass in C++."""

    def __init__(self, native: Any) -> None:
        self.report: Callable[[bool], None] | None = None
        self._native = native
        self._pass = native.ForwardPass()

    def begin(self, owner: object, rounds: Any) -> None:
        """Let the recorded modules of ``owner`` be entered by the fast path in this thread."""
        self._pass.begin(owner, rounds)

    def run(self, region: Region, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` as part of ``region``."""
        return self._pass.run(_in_native_form(self._native, region), forward, args, kwargs)

    def close(self, *, is_complete: bool = True) -> None:
        """End the pass, and forget how to replay what outlives it, such as the model's outputs: nobody will ask."""
        if is_complete:
            is_as_planned = self._pass.is_as_planned()
            log_event("pass", "as planned" if is_as_planned else "not as planned")
            if self.report is not None:
                self.report(is_as_planned)
        self._pass.close(is_complete)


def _in_native_form(native: Any, region: Region) -> object:
    if region.in_native_form is None:
        region.in_native_form = native.Region(
            region.place,
            [(call.patterns, call.num_calls) for call in region.calls],
            region.beyond,
            region.window_bytes,
            region.records,
            region.watches,
        )
    return region.in_native_form
