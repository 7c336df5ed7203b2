"""memfit as a callback of transformers' ``Trainer``, and of the trainers of TRL."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map
from transformers import Trainer, TrainerCallback

from memfit.errors import InvalidParameterError
from memfit.integrations.fitting_callback import FittingCallback
from memfit.integrations.loader_batches import MOST_MICRO_BATCHES, fit_sizes, smallest_and_largest


class MemfitCallback(FittingCallback, TrainerCallback):
    """Fits the trainer's training step into ``budget`` when training begins.

    ``Trainer(..., callbacks=[MemfitCallback("20GiB")])``. The step that is measured is the trainer's own: its
    ``training_step`` (and so its ``compute_loss``, autocast, label smoother and micro-batches), the clipping of
    gradients and its optimizer. The plan is for the largest of the first batches; where these differ in sizes, each
    forward pass runs by a plan for its size, and larger batches are planned for when they come. Gradient checkpointing
    is switched off, with a warning: the plan decides what is recomputed. ``budget``, ``host_budget``, ``compile`` and
    ``chunk_loss`` are as for `memfit.fit`.

    ``fitted`` is the result once training has begun. The plan is taken off the model when training ends.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Profile, plan, verify and apply, before the first step."""
        trainer = _trainer_of(self)
        model = trainer.model_wrapped
        _refuse_unfit(trainer)
        _switch_off_checkpointing(trainer.model)
        num_micro_batches = min(args.gradient_accumulation_steps, MOST_MICRO_BATCHES)
        smallest, largest = smallest_and_largest(kwargs["train_dataloader"])
        # What the loop holds besides the micro-batch that runs: the others of its step, the one that is fetched ahead,
        # and the losses of the last micro-batch and of all of them.
        others = [_copied(largest, args.device) for _ in range(args.gradient_accumulation_steps)]
        held = [*others, torch.zeros(2, device=args.device)]

        def step(held: dict[str, Any]) -> None:
            used = [held["batch"]] * num_micro_batches
            micro_batches, num_items = trainer.get_batch_samples(iter(used), len(used), args.device)
            trainer.current_gradient_accumulation_steps = len(micro_batches)
            for micro_batch in micro_batches:
                trainer.training_step(model, dict(micro_batch), num_items)
            if args.max_grad_norm:
                trainer.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)

        self.fitted = fit_sizes(
            model,
            {"batch": _copied(smallest, args.device), "held": held},
            {"batch": _copied(largest, args.device), "held": held},
            step=step,
            optimizer=kwargs["optimizer"],
            **self.options,
        )


def _trainer_of(callback: MemfitCallback) -> Any:
    """Return the trainer that is calling: transformers gives callbacks all of a trainer's parts but itself."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    raise InvalidParameterError("MemfitCallback is called by transformers.Trainer and trainers derived from it only")


def _refuse_unfit(trainer: Any) -> None:
    if trainer.args.n_gpu > 1:
        raise InvalidParameterError(
            f"the trainer spreads each batch over {trainer.args.n_gpu} GPUs (DataParallel), and a budget is for one "
            "device; start one process for each GPU with torchrun, or set CUDA_VISIBLE_DEVICES to one"
        )
    if trainer.is_deepspeed_enabled:
        raise InvalidParameterError("DeepSpeed runs the backward pass itself; memfit works with DDP and FSDP2 instead")


def _switch_off_checkpointing(model: Any) -> None:
    if not getattr(model, "is_gradient_checkpointing", False):
        return
    model.gradient_checkpointing_disable()
    warnings.warn(
        "gradient_checkpointing=True was switched off: memfit's plan decides what is recomputed, and it cannot plan "
        "inside blocks that are recomputed as a whole",
        stacklevel=3,
    )


def _copied(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Mapping):
        batch = dict(batch)
    return tree_map(lambda entry: entry.to(device, copy=True) if isinstance(entry, torch.Tensor) else entry, batch)
