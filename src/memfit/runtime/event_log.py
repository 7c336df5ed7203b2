"""What an engine does in a step, as texts: both engines must do the same. Nothing is logged but inside `logged_events`.

- ``record PATH OP``: a call in the recorded module was kept for a replay.
- ``drop PATH OP POSITION``, ``offload PATH OP``: an output was given up.
- ``replay OP``: an op was run again, or ``fetch``: a value came back from the host.
- ``calls PATH OP=NUMBER ...``: a call of a recorded module ended; how often the ops with decisions were called in it.
- ``pass as planned``, ``pass not as planned``: the forward pass ended.

`native/event_log.h` has the same for the engine in C++.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memfit.runtime import native_library

_events: list[str] | None = None


def is_logging() -> bool:
    """Return whether events are logged now."""
    return _events is not None


def log_event(*parts: object) -> None:
    """Add an event, where events are logged."""
    if _events is not None:
        _events.append(" ".join(map(str, parts)))


@contextmanager
def logged_events() -> Iterator[list[str]]:
    """Log the events of both engines inside the block, into the list. Blocks do not nest."""
    global _events
    native = native_library.configured_module()
    events: list[str] = []
    _events = events
    if native is not None:
        native.log_events(events.append)
    try:
        yield events
    finally:
        _events = None
        if native is not None:
            native.log_events(None)
