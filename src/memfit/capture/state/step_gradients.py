"""Which gradients a step begins with, found from its first two runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from memfit.capture.training_step import TrainingStep
from memfit.distributed.local_tensors import is_dtensor
from memfit.runtime.engine.call_arguments import is_strided

# The ops by which gradients are cleared and kept.
ZEROING_OPS = ("aten.zero_", "aten._foreach_zero_")
# The first run shows which gradients a step leaves, the second one whether it clears them itself.
_NUM_RUNS = 2


class StepGradients:
    """The gradients of the step before, which exist where a run of ``step`` begins.

    With ``gradients="kept"``, or where a step function clears gradients itself, those that the first run left. What a
    run lets go of is made by each run itself, so that it is gone when the run clears it; what it fills with zeros, or
    adds to, stays from run to run. Otherwise there are none. Where steps differ, what other ones left is there, too.
    """

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._num_runs = 0
        self._clears = False
        step.gradients_at_start = ()

    @property
    def num_runs_to_watch(self) -> int:
        """How many runs it takes to know."""
        return 1 if self._step.arguments.step is None else _NUM_RUNS

    @property
    def kept(self) -> list[Tensor]:
        """The gradients that stay from run to run."""
        return [gradient for _, gradient in self._kept]

    def begin(self) -> None:
        """Let a run begin with the gradients that stay, filled with zeros."""
        for leaf, gradient in self._kept:
            leaf.grad = gradient.zero_()

    def learn(self, leaves: Sequence[Tensor], *, fills_with_zeros: bool) -> None:
        """Learn from a run that has ended, which may have filled gradients of `kept` with zeros."""
        arguments = self._step.arguments
        self._num_runs += 1
        if self._num_runs == 1 and (arguments.gradients == "kept" or arguments.step is not None):
            found = {id(leaf): (leaf, leaf.grad) for leaf in leaves}
            self._kept = [(leaf, gradient) for leaf, gradient in found.values() if gradient is not None]
        if self._num_runs > _NUM_RUNS and self._clears:
            known = {id(leaf) for leaf, *_ in (*self._kept, *self._step.gradients_at_start)}
            self._add_at_start((leaf, leaf.grad) for leaf in leaves if leaf.grad is not None and id(leaf) not in known)
        if self._num_runs != _NUM_RUNS or arguments.step is None:
            return
        cleared = [(leaf, kept) for leaf, kept in self._kept if leaf.grad is not kept]
        if arguments.gradients == "fresh" and not cleared and not fills_with_zeros:
            # They add up until the loop around the step clears them, and that is before the next step.
            self._kept = []
            return
        self._clears = True
        self._add_at_start(cleared)
        leaves_of_made = {id(leaf) for leaf, *_ in self._step.gradients_at_start}
        self._kept = [(leaf, kept) for leaf, kept in self._kept if id(leaf) not in leaves_of_made]

    def _add_at_start(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._step.gradients_at_start += tuple(
            (leaf, gradient.shape, gradient.dtype, gradient.device)
            for leaf, gradient in gradients
            if _has_own_memory(gradient)
        )


def _has_own_memory(gradient: Tensor) -> bool:
    """Return whether ``gradient`` is a tensor of this process, and no view of a bucket."""
    if not is_strided(gradient) or is_dtensor(gradient):
        return False
    return gradient.untyped_storage().nbytes() == gradient.numel() * gradient.itemsize
