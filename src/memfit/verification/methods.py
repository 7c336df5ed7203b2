"""Methods of running a model's training step: plain, by a plan, or with torch's own checkpointing to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.graph.plan import Plan
from memfit.runtime.applying.apply import Applied, refuse_unfit
from memfit.runtime.applying.forward_wrapping import Forward, wrap_forward
from memfit.runtime.engine.forward_pass import UnplannedCalls
from memfit.runtime.engine.native_tape import new_tape

Method = Callable[[nn.Module], AbstractContextManager[object]]
"""Given the model, returns the block inside which its steps run by that method."""


def plain(model: nn.Module) -> AbstractContextManager[object]:
    """Run the model as it is."""
    return nullcontext()


class Planned:
    """Runs the model by ``plan``. ``unplanned`` are the first calls that were not as planned."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.unplanned: UnplannedCalls | None = None

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        """Apply the plan inside the block."""
        # What is to be warned of, such as other inputs, whoever verifies or applies the plan is warned of, once.
        refuse_unfit(model, self._plan)
        with Applied(model, replace(self._plan, inputs=()), new_tape, warns_of_calls=False) as applied:
            yield
        self.unplanned = self.unplanned or applied.check.unplanned


def compiled_reference(plan: Plan) -> Method:
    """Run the blocks that ``plan`` compiles compiled, and save everything in them and outside of them."""
    assert plan.compiled is not None
    compiled = plan.compiled.reference()
    return Planned(replace(plan, compiled=compiled, decisions={}, recorded_modules=(), hooked_modules=(), outline=None))


def checkpointed(paths: Sequence[str]) -> Method:
    """Run each of the modules at ``paths`` under torch.utils.checkpoint."""

    def run_checkpointed(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    @contextmanager
    def by_checkpoint(model: nn.Module) -> Iterator[None]:
        modules = dict(model.named_modules())
        unwrap = [wrap_forward(modules[path], run_checkpointed) for path in paths]
        try:
            yield
        finally:
            for take_off in unwrap:
                take_off()

    return by_checkpoint
