"""The interface of a tape, in Python or in C++, to the code that applies plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from memfit.runtime.engine.planned_modules import PlannedModule


class Rounds:
    """Counts the rounds of a planned model: a round is the passes from one backward pass to the next.

    The calls of a module are numbered anew in each round. `native/values.h` has the same for the engine in C++.
    """

    def __init__(self) -> None:
        self.number = 0
        self.backward_began = False

    def begin_pass(self) -> int:
        """Return the round of the forward pass that begins now."""
        if self.backward_began:
            self.backward_began = False
            self.number += 1
        return self.number


class ForwardPass(Protocol):
    """One forward pass of a planned model."""

    report: Callable[[bool], None] | None
    """Called after a whole pass: whether the ops were called as often as the plan expects."""

    def begin(self, owner: object, rounds: Any) -> None:
        """Make this the pass of ``owner`` in this thread from now on; ``rounds`` are its `Rounds`."""
        ...

    def run(self, planned: PlannedModule, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` as a call of ``planned``, which may be inside another."""
        ...

    def close(self, *, is_complete: bool = True) -> None:
        """End the pass, which an exception may have ended early: nothing more will be recorded."""
        ...
