"""One training step of a user's model: how the batch is passed, what the loss is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from memfit.capture.phases import before_optimizer_steps
from memfit.capture.step_arguments import StepArguments, innermost_optimizer
from memfit.distributed.local_tensors import local_tensor
from memfit.distributed.ranks import Ranks, ranks_of
from memfit.distributed.wrapped_models import bare_model
from memfit.errors import InvalidParameterError
from memfit.graph.model_profile import Phase
from memfit.runtime.applying.batch_tensors import tensors_of
from memfit.runtime.engine.call_arguments import tensors_in

PhaseObserver = Callable[[Phase], object]

# A batch under one of these names says that the model is trained on a loss of its own.
_LABELS = ("labels", "label", "label_ids", "targets", "target", "start_positions")


class TrainingStep:
    """A model and the step arguments: a callable unit that is run to be measured.

    A run holds what the training loop holds. With a loss function that is the loss; the model's output lives as long
    as the loss is computed. What a ``step`` function holds is its own affair.
    """

    def __init__(self, model: nn.Module, arguments: StepArguments, *, warns: bool = True) -> None:
        self.model = model
        self.arguments = arguments
        self.warns = warns
        # Whether a run was seen to wait for other processes.
        self.runs_collectives = False
        # Whether all processes that run the step together have the same model, unlike the stages of a pipeline.
        self.have_one_model = True
        # Which of the runs that differ is measured: the one with random numbers from this seed, as they are where it is
        # None, after so many other steps.
        self.random_seed: int | None = None
        # Whether Python may decide by random numbers what a run does.
        self.branches_at_random = False
        self.num_steps_before = 0
        # All that the step's functions were seen to reach, beside its own.
        self.reached_optimizers: Collection[Any] = ()
        # Leaves, and the form of the gradients of the step before, which a step function clears after its first ops.
        self.gradients_at_start: tuple[tuple[Tensor, torch.Size, torch.dtype, torch.device], ...] = ()

    @property
    def ranks(self) -> Ranks:
        """The processes that must run the step equally often; those of a bare model are known after its first run."""
        return ranks_of(self.model, runs_collectives=self.runs_collectives, have_one_model=self.have_one_model)

    @property
    def batch(self) -> Any:
        """The batch of the step arguments."""
        return self.arguments.batch

    @property
    def optimizer(self) -> Any:
        """The optimizer of the step arguments, which may be a wrapper of one."""
        return self.arguments.optimizer

    @property
    def has_exact_phases(self) -> bool:
        """Whether `run` knows exactly where phases begin."""
        return self.arguments.step is None

    def run(self, on_phase: PhaseObserver | None = None) -> None:
        """Run the step. ``on_phase`` is called where a forward, a backward or an optimizer phase begins.

        The phases of a ``step`` function are found by hooks on the model: approximately, since the loss belongs to no
        module. Recordings find them exactly, op by op.
        """
        optimizer = self.optimizer
        for leaf, shape, dtype, device in self.gradients_at_start:
            leaf.grad = torch.zeros(shape, dtype=dtype, device=device)
        if self.arguments.step is None:
            self.run_forward_and_backward(on_phase)
        else:
            stepped: list[torch.optim.Optimizer] = []
            with before_optimizer_steps(stepped.append):
                self.run_forward_and_backward(on_phase)
            if innermost_optimizer(optimizer) in stepped:
                optimizer = None
        if optimizer is not None:
            if on_phase is not None:
                on_phase(Phase.OPTIMIZER)
            optimizer.step()

    def run_forward_and_backward(self, on_phase: PhaseObserver | None = None) -> None:
        """Run the step without the optimizer, except where the ``step`` function itself steps one."""
        step = self.arguments.step
        if step is not None:
            with nullcontext() if on_phase is None else _phases_seen_by(self.model, on_phase):
                step() if self.batch is None else step(self.batch)
            return
        if on_phase is not None:
            on_phase(Phase.FORWARD)
        loss = self.run_forward()
        if on_phase is not None:
            on_phase(Phase.BACKWARD)
        loss.backward()

    def run_forward(self) -> Tensor:
        """Run the forward pass and the loss of a step with a loss function, and return the loss."""
        return self._loss_of(forward(self.model, self.batch))

    def _loss_of(self, output: Any) -> Tensor:
        loss, targets = self.arguments.loss, self.arguments.targets
        if loss is not None:
            return checked_loss(loss(output) if targets is None else loss(output, targets), None)
        value, is_chosen = default_loss(output)
        if is_chosen:
            self._refuse_labels_without_loss()
            if self.warns:
                self.warns = False
                warnings.warn(
                    "the model's output has no loss, and no loss= was given: the step is measured with the mean of the "
                    "outputs as its loss. A real loss may take more memory; pass loss=, or step= with the whole step",
                    stacklevel=2,
                )
        return checked_loss(value, output)

    def _refuse_labels_without_loss(self) -> None:
        labels = [name for name in _LABELS if isinstance(self.batch, Mapping) and name in self.batch]
        if labels:
            raise InvalidParameterError(
                f"the batch has {labels[0]!r}, and the output of {type(self.model).__name__} has no loss: pass loss=, "
                "a function of the output, or step=, a function that runs the whole training step"
            )

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return what is known to exist before the step, by name: parameters, buffers, batch, optimizer state."""
        model = bare_model(self.model)
        named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        named += [(f"batch#{number}", tensor) for number, tensor in enumerate(tensors_of(self.batch))]
        named += [(f"targets#{number}", tensor) for number, tensor in enumerate(tensors_of(self.arguments.targets))]
        # The state is a mapping from parameters; only what it maps them to is state. Optimizers that only other steps
        # than this one step have theirs, too.
        optimizers = [innermost_optimizer(self.optimizer), *self.reached_optimizers]
        states = tensors_of([list(getattr(optimizer, "state", {}).values()) for optimizer in optimizers])
        named += [(f"optimizer state#{number}", tensor) for number, tensor in enumerate(states)]
        if self.arguments.gradients == "kept":
            # Those of other leaves are named when the step meets them.
            gradients = [(f"{name}.grad", leaf.grad) for name, leaf in model.named_parameters()]
            named += [(name, gradient) for name, gradient in gradients if gradient is not None]
        return [(name, local_tensor(tensor)) for name, tensor in named]


@contextmanager
def _phases_seen_by(model: nn.Module, on_phase: PhaseObserver) -> Iterator[None]:
    """Call ``on_phase`` where ``model`` is called, where its output receives a gradient, and where optimizers step."""
    seen: Phase | None = None

    def see(phase: Phase) -> None:
        nonlocal seen
        if phase is not seen:
            seen = phase
            on_phase(phase)

    def see_output(_: nn.Module, __: Any, output: Any) -> None:
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: see(Phase.BACKWARD))

    hooks = [
        model.register_forward_pre_hook(lambda *_: see(Phase.FORWARD)),
        model.register_forward_hook(see_output),
    ]
    try:
        with before_optimizer_steps(lambda _: see(Phase.OPTIMIZER)):
            see(Phase.FORWARD)
            yield
    finally:
        for hook in hooks:
            hook.remove()


def forward(model: nn.Module, batch: Any) -> Any:
    """Call ``model`` on ``batch``: a tuple or list is spread, a dict (or what acts as one) is passed by keyword."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def checked_loss(value: Any, output: Any) -> Tensor:
    """Return ``value`` if it is a scalar to differentiate; ``output`` is the model's where the loss is the default."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad and not value.is_complex():
        return value
    raise InvalidParameterError(_what_is_wrong_with(value, output))


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


def default_loss(output: Any) -> tuple[Any, bool]:
    """Return the output's own loss where it has one, the output where it is a scalar, else the mean of its tensors.

    The second entry is whether the mean was chosen, which nobody asked for.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named, False
    if isinstance(output, Tensor) and output.numel() == 1:
        return output, False
    floating = [tensor for tensor in _returned(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not floating:
        return output, False
    means = [tensor.float().mean() for tensor in floating] if len(floating) > 1 else [floating[0].mean()]
    return torch.stack(means).mean() if len(means) > 1 else means[0], True


def _returned(output: Any) -> list[Tensor]:
    """Return the tensors that a model gives back, and not those in objects beside them, such as a cache."""
    if isinstance(output, Mapping):
        return tensors_in(list(output.values()))
    if hasattr(output, "__dataclass_fields__"):
        return tensors_in([getattr(output, name) for name in output.__dataclass_fields__])
    return tensors_in(output)
