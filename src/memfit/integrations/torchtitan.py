"""memfit as an activation checkpointing policy of torchtitan."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from memfit.errors import InvalidParameterError
from memfit.fitting import fit
from memfit.integrations.loader_batches import MOST_MICRO_BATCHES


class MemfitAC(ActivationCheckpointing):  # type: ignore[misc, unused-ignore]
    """Fits the trainer's training step into a budget, in place of a rule that chooses ops or blocks to recompute.

    ``config.activation_checkpoint = MemfitAC.Config(budget="20GiB")``. The step that is measured is the trainer's own:
    its ``forward_backward_step``, the clipping of gradients and its optimizers, on the first batch, before the first
    forward pass. ``budget``, ``host_budget`` and ``compile`` are as for `memfit.fit`. What was measured is logged.

    CUDA graphs of torchtitan and pipeline parallelism are refused: set ``training.disable_cuda_graphs``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc, unused-ignore]
        """The budget for the memory of one process, and how it may be kept."""

        budget: int | float | str = "auto"
        host_budget: int | str = 0
        compile: bool = False

    def apply(self, model: nn.Module) -> None:
        """Let the first forward pass of ``model`` fit it; it has neither weights nor batches yet."""
        _FirstPass(model, self.config)


class _FirstPass:
    """Fits ``model`` in front of its first forward pass with gradients, and does nothing from then on."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        self._model = model
        self._config = config
        self._is_fitted = False
        # A hook of all modules runs before those of FSDP2, which gather the model's parameters.
        self._hook = register_module_forward_pre_hook(self._fit)
        # The call that the hook runs in has looked `forward` up before, and is to run by the plan, too.
        vars(model)["forward"] = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        return model.forward(*args, **kwargs) if self._is_fitted else type(model).forward(model, *args, **kwargs)

    def _fit(self, module: nn.Module, _: Any) -> None:
        if module is self._model and torch.is_grad_enabled():
            self._hook.remove()
            del vars(module)["forward"]
            self._is_fitted = True
            _fit(module, self._config)


def _fit(model: nn.Module, config: Any) -> None:
    trainer, batch = _calling_trainer(model)
    num_micro_batches = min(trainer.gradient_accumulation_steps, MOST_MICRO_BATCHES)

    def step(batch: dict[str, Any]) -> None:
        for _ in range(num_micro_batches):
            trainer.forward_backward_step(**{**batch, "input_dict": dict(batch["input_dict"])})
        parameters = [parameter for part in trainer.model_parts for parameter in part.parameters()]
        clip_grad_norm_(parameters, trainer.config.training.max_norm, foreach=True)
        trainer.optimizers.step()

    fitted = fit(
        model,
        batch,
        step=step,
        budget=config.budget,
        host_budget=config.host_budget,
        compile=config.compile,
    )
    logger.info(str(fitted))


def _calling_trainer(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """Return the trainer that is calling ``model``, and what its `forward_backward_step` was called with."""
    frame = inspect.currentframe()
    while frame is not None:
        # Only this frame's variables are asked for: those of the running function would make a cycle that holds all
        # callers' tensors until garbage is collected, which the trainer does rarely.
        if frame.f_code.co_name == "forward_backward_step":
            variables = frame.f_locals
            trainer = variables.get("self")
            if isinstance(trainer, Trainer):
                _refuse_unfit(trainer)
                return trainer, {name: variables[name] for name in ("input_dict", "labels", "global_valid_tokens")}
        frame = frame.f_back
    raise InvalidParameterError(
        f"MemfitAC fits a {type(model).__name__} that torchtitan's Trainer trains; in other loops, call memfit.fit"
    )


def _refuse_unfit(trainer: Any) -> None:
    if trainer.parallel_dims.pp_enabled:
        raise InvalidParameterError(
            "MemfitAC does not work with pipeline parallelism: set parallelism.pipeline_parallel_degree to 1"
        )
    if trainer.device.type == "cuda" and not trainer.config.training.disable_cuda_graphs:
        raise InvalidParameterError(
            "MemfitAC works with steps that are launched op by op: set training.disable_cuda_graphs"
        )
