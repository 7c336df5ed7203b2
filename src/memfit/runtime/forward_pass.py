"""What `apply` needs of a tape, be it the one in Python or the one in C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from memfit.runtime.recorded_modules import Region


class ForwardPass(Protocol):
    """One forward pass of a planned model."""

    report: Callable[[bool], None] | None
    """Told, after a whole pass, whether the ops were called as often as the plan expects."""

    def begin(self, owner: object) -> None:
        """Tell that from now on, in this thread, this is the pass of ``owner``, whose regions will be gone into."""
        ...

    def run(self, region: Region, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``forward`` as part of ``region``, which may lie inside another."""
        ...

    def close(self, *, is_complete: bool = True) -> None:
        """End the pass, which an exception may have ended early: nothing more will be heard."""
        ...
