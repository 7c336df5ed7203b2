"""What the callbacks of training frameworks have in common."""

from __future__ import annotations

from typing import Any, Literal

from memfit.budgets import BudgetLike, HostBudgetLike
from memfit.fitted import Fitted


class FittingCallback:
    """Has the arguments of `memfit.fit`, and its result once training has begun. Takes the plan off at the end."""

    def __init__(
        self,
        budget: BudgetLike,
        *,
        host_budget: HostBudgetLike = 0,
        compile: bool | Literal["auto"] = False,
        chunk_loss: bool = False,
    ) -> None:
        self.fitted: Fitted | None = None
        self.options: dict[str, Any] = {
            "budget": budget,
            "host_budget": host_budget,
            "compile": compile,
            "chunk_loss": chunk_loss,
        }

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Take the plan off the model."""
        if self.fitted is not None and self.fitted.is_applied:
            self.fitted.remove()
