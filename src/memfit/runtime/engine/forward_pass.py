"""The interface of a tape, in Python or in C++, to the code that applies plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from memfit.runtime.engine.planned_modules import PlannedModule


class UnplannedCalls(NamedTuple):
    """How often an op ran in a call of a recorded module, where the plan expects another number."""

    module: str
    op: str
    num_planned: int
    num_calls: int

    def in_words(self) -> str:
        """Return what ran and what the plan expects."""
        place = f"in a call of {self.module!r}" if self.module else "outside of the model's parts"
        return f"{self.op} ran {self.num_calls} times {place}, and the plan expects {self.num_planned}"


class ForwardPass(Protocol):
    """One forward pass of a planned model."""

    report: Callable[[UnplannedCalls | None], None] | None
    """Called after a whole pass: with the first calls that are not as planned, or None."""

    def run(self, planned: PlannedModule, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` as a call of ``planned``, which may be inside another."""
        ...

    def close(self, *, is_complete: bool = True) -> None:
        """End the pass, which an exception may have ended early: nothing more will be recorded."""
        ...
