"""One training step of a user's model: how the batch is passed, what the loss is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import InvalidParameterError
from memfit.graph.model_profile import Phase
from memfit.runtime.batch_tensors import tensors_of
from memfit.runtime.call_arguments import tensors_in

Loss = Callable[[Any], Tensor]
PhaseContext = Callable[[Phase], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A model, a batch for it, the loss and, where the step is to end with one, the optimizer."""

    model: nn.Module
    batch: Any
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None

    def run(self, around: PhaseContext = nullcontext) -> object:
        """Run the step, each phase inside ``around(phase)``; return the output and the loss.

        A training loop has both in hand while backward runs, so they live as long here.
        """
        held = self.run_forward_and_backward(around)
        if self.optimizer is not None:
            with around(Phase.OPTIMIZER):
                self.optimizer.step()
        return held

    def run_forward_and_backward(self, around: PhaseContext = nullcontext) -> object:
        """Run the step without the optimizer, and return the output and the loss."""
        output, loss = self.run_forward(around)
        with around(Phase.BACKWARD):
            loss.backward()
        return output, loss

    def run_forward(self, around: PhaseContext = nullcontext) -> tuple[Any, Tensor]:
        """Run the forward pass and the loss, and return the output and the loss."""
        with around(Phase.FORWARD):
            output = forward(self.model, self.batch)
            return output, loss_of(output, self.loss)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return what is known to exist before the step, by name: parameters, buffers, batch, optimizer state."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        named += [(f"batch#{number}", tensor) for number, tensor in enumerate(tensors_of(self.batch))]
        if self.optimizer is not None:
            # The state is a mapping from parameters; only what it maps them to is state.
            states = tensors_of(list(self.optimizer.state.values()))
            named += [(f"optimizer state#{number}", tensor) for number, tensor in enumerate(states)]
        return named


def forward(model: nn.Module, batch: Any) -> Any:
    """Call ``model`` on ``batch``: a tuple or list is spread, a dict (or what acts as one) is passed by keyword."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def loss_of(output: Any, loss: Loss | None) -> Tensor:
    """Return the scalar to differentiate.

    Without ``loss`` that is the output's own loss where it has one, the output where it is a scalar, else the mean of
    its floating tensors.
    """
    value = loss(output) if loss is not None else _default_loss(output)
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad and not value.is_complex():
        return value
    raise InvalidParameterError(_what_is_wrong_with(value, output if loss is None else None))


def _what_is_wrong_with(value: object, output: Any) -> str:
    """Return why ``value`` is no loss; ``output`` is the model's where the loss is the default one."""
    if not torch.is_grad_enabled():
        return (
            "gradients are switched off, so that there is no backward pass to run; call memfit outside of "
            "torch.no_grad() and torch.inference_mode()"
        )
    tensors = tensors_of(output)
    if tensors and not any(tensor.requires_grad for tensor in tensors):
        return (
            "nothing in the model's output requires gradients: its parameters are frozen, or its forward pass detaches "
            "from them. Call requires_grad_() on what is to be trained"
        )
    given, unattached = f"a {type(value).__name__}", ""
    if isinstance(value, Tensor):
        given = f"a {'complex ' if value.is_complex() else ''}tensor of shape {tuple(value.shape)}"
        unattached = " that no parameter influences" if value.numel() == 1 and not value.requires_grad else ""
    return (
        f"the loss is {given}{unattached}; it must be a tensor with one element that is real and depends on parameters "
        "which require gradients. Pass loss=function_of_the_output, such as loss=lambda output: output.mean()"
    )


def _default_loss(output: Any) -> Any:
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    floating = [tensor for tensor in _returned(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not floating:
        return output
    return (
        torch.stack([tensor.float().mean() for tensor in floating]).mean() if len(floating) > 1 else floating[0].mean()
    )


def _returned(output: Any) -> list[Tensor]:
    """Return the tensors that a model gives back, and not those in objects beside them, such as a cache."""
    if isinstance(output, Mapping):
        return tensors_in(list(output.values()))
    if hasattr(output, "__dataclass_fields__"):
        return tensors_in([getattr(output, name) for name in output.__dataclass_fields__])
    return tensors_in(output)
