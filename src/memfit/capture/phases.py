"""Which phase of a training step runs now: found by what runs, whoever called it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memfit.graph.model_profile import Phase
from memfit.runtime.torch_internals import is_in_backward


class PhaseTracker:
    """Finds the phase of the op that runs now, inside the block of `tracked`.

    Inside the step of any optimizer, also of one that a hook steps during a backward pass, that is the optimizer phase;
    else inside autograd's engine the backward phase. All else is ``outer``, which is the forward phase unless whoever
    runs the step knows better.
    """

    def __init__(self) -> None:
        self.outer = Phase.FORWARD
        self._num_optimizers = 0

    @property
    def phase(self) -> Phase:
        """The phase of what runs now, in this thread."""
        if self._num_optimizers:
            return Phase.OPTIMIZER
        return Phase.BACKWARD if is_in_backward() else self.outer

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Track the steps of optimizers inside the block."""

        def enter(*_: Any) -> None:
            self._num_optimizers += 1

        def leave(*_: Any) -> None:
            self._num_optimizers -= 1

        hooks = register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)
        try:
            yield
        finally:
            self._num_optimizers = 0
            for hook in hooks:
                hook.remove()


@contextmanager
def before_optimizer_steps(call: Callable[[torch.optim.Optimizer], None]) -> Iterator[None]:
    """Call ``call`` with each optimizer that is stepped inside the block, before each of its steps."""
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: call(optimizer))
    try:
        yield
    finally:
        hook.remove()
