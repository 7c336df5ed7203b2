"""What an engine does in a step, as texts: both engines must do the same. Nothing is logged but inside `logged_events`.

- ``record PATH OP``: a call in the recorded module was kept for a replay.
- ``drop PATH OP POSITION``, ``offload PATH OP``: an output was given up.
- ``replay OP``: an op was run again, or ``fetch``: a value came back from the host.
- ``calls PATH OP=NUMBER ...``: a call of a recorded module ended; how often the ops with decisions were called in it.
- ``pass as planned``, ``pass not as planned``: the forward pass ended.

`native/event_log.h` has the same for the engine in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

LogTo = Callable[[Callable[[str], None] | None], None]

_events: list[str] | None = None
_engines: list[LogTo] = []


def add_engine(log_to: LogTo) -> None:
    """Let an engine in another language take part: ``log_to`` receives what takes each event, or None."""
    _engines.append(log_to)
    if _events is not None:
        log_to(_events.append)


def log_event(*parts: object) -> None:
    """Add an event, where events are logged."""
    if _events is not None:
        _events.append(" ".join(map(str, parts)))


@contextmanager
def logged_events() -> Iterator[list[str]]:
    """Log the events of both engines inside the block, into the list. Blocks do not nest."""
    global _events
    events: list[str] = []
    _events = events
    for log_to in _engines:
        log_to(events.append)
    try:
        yield events
    finally:
        _events = None
        for log_to in _engines:
            log_to(None)
