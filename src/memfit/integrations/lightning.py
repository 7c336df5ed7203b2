"""memfit as a callback of Lightning's ``Trainer``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn

from memfit.integrations.fitting_callback import FittingCallback
from memfit.integrations.loader_batches import fit_sizes, smallest_and_largest

# Numbers on the device: the losses that the loop keeps, and what training_step logs.
_MOST_LOGGED = 16


class MemfitCallback(FittingCallback, Callback):
    """Fits the module's training step into ``budget`` when training starts.

    ``Trainer(..., callbacks=[MemfitCallback("20GiB")])``. The step that is measured is the module's ``training_step``
    in the precision of the trainer and, unless it optimizes by itself, in the order of automatic optimization: the
    gradients of the last step exist until the loss of the next one is computed. The plan is for the largest of the
    first batches; where these differ in sizes, each forward pass runs by a plan for its size, and larger batches are
    planned for when they come. ``budget``, ``host_budget``, ``compile`` and ``chunk_loss`` are as for `memfit.fit`.

    ``fitted`` is the result once training has started. The plan is taken off the model when training ends.
    """

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Profile, plan, verify and apply, before the first step."""
        # It draws from all of the trainer's loaders: batches, and which they are.
        (smallest, *_), (largest, *_) = smallest_and_largest(trainer.fit_loop._combined_loader)
        # A module that optimizes by itself may step it in some steps only: its state is there in all of them.
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        held = torch.zeros(_MOST_LOGGED, device=pl_module.device)

        def step(held: dict[str, Any]) -> None:
            output = trainer.strategy.training_step(held["batch"], 0)
            if not pl_module.automatic_optimization:
                return
            loss = output["loss"] if isinstance(output, Mapping) else output
            if trainer.accumulate_grad_batches == 1 and optimizer is not None:
                pl_module.optimizer_zero_grad(trainer.current_epoch, 0, optimizer)
            pl_module.backward(loss / trainer.accumulate_grad_batches)
            if optimizer is not None:
                pl_module.configure_gradient_clipping(
                    optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
                )

        with _logging_as_in_a_step(trainer, pl_module):
            self.fitted = fit_sizes(
                _planned_module(pl_module),
                {"batch": _on_device(smallest, trainer, pl_module), "held": held},
                {"batch": _on_device(largest, trainer, pl_module), "held": held},
                step=step,
                optimizer=optimizer,
                gradients="kept",
                **self.options,
            )


def _on_device(batch: Any, trainer: Any, pl_module: LightningModule) -> Any:
    batch = trainer.precision_plugin.convert_input(batch)
    batch = pl_module.on_before_batch_transfer(batch, 0)
    batch = pl_module.transfer_batch_to_device(batch, pl_module.device, 0)
    return pl_module.on_after_batch_transfer(batch, 0)


def _planned_module(pl_module: LightningModule) -> nn.Module:
    """Return the module whose calls are forward passes: the only part with parameters where the whole is not."""
    if type(pl_module).forward is not LightningModule.forward:
        return pl_module
    parts = [part for part in pl_module.children() if next(part.parameters(), None) is not None]
    has_own = next(pl_module.parameters(recurse=False), None) is not None
    return parts[0] if len(parts) == 1 and not has_own else pl_module


@contextmanager
def _logging_as_in_a_step(trainer: Any, pl_module: LightningModule) -> Iterator[None]:
    """Let ``self.log`` in training_step do what it does there, and drop what it logged."""
    hook = pl_module._current_fx_name
    pl_module._current_fx_name = "training_step"
    try:
        yield
    finally:
        pl_module._current_fx_name = hook
        trainer._results.clear()
