"""memfit for training loops with an ``Accelerator``."""

from __future__ import annotations

from typing import Any, Literal

from accelerate import Accelerator
from torch import nn

from memfit.budgets import BudgetLike, HostBudgetLike
from memfit.capture.step_arguments import Loss
from memfit.capture.training_step import checked_loss, default_loss, forward
from memfit.fitted import Fitted
from memfit.fitting import fit
from memfit.integrations.loader_batches import MOST_MICRO_BATCHES
from memfit.progress import Progress


def fit_prepared(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    batch: Any,
    *,
    budget: BudgetLike,
    loss: Loss | None = None,
    targets: Any = None,
    host_budget: HostBudgetLike = 0,
    compile: bool | Literal["auto"] = False,
    chunk_loss: bool = False,
    progress: Progress | None = None,
) -> Fitted:
    """Make the training steps of a prepared ``model`` stay within ``budget``: `memfit.fit` for loops of accelerate.

    ``model`` and ``optimizer`` are what ``accelerator.prepare`` returned, ``batch`` is one of the prepared loader, the
    largest that occurs. The step is forward pass, loss, ``accelerator.backward`` and ``optimizer.step``, with the
    accelerator's autocast; where it accumulates gradients, they exist while the forward pass runs. All other arguments
    are as for `memfit.fit`.
    """
    num_micro_batches = min(accelerator.gradient_accumulation_steps, MOST_MICRO_BATCHES)

    def step(batch: Any) -> None:
        for _ in range(num_micro_batches):
            output = forward(model, batch)
            if loss is None:
                value = default_loss(output)[0]
            else:
                value = loss(output) if targets is None else loss(output, targets)
            accelerator.backward(checked_loss(value, None if loss is not None else output))

    return fit(
        model,
        batch,
        step=step,
        optimizer=optimizer,
        budget=budget,
        host_budget=host_budget,
        compile=compile,
        chunk_loss=chunk_loss,
        progress=progress,
    )
