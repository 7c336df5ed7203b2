"""Ways to run a model's training step: plain, by a plan, or with torch's own checkpointing to compare with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.graph.plan import Plan
from memfit.runtime.applying.apply import apply
from memfit.runtime.applying.forward_wrapping import Forward, wrap_forward

Way = Callable[[nn.Module], AbstractContextManager[object]]
"""Given the model, returns the block inside which its steps run that way."""


def plain(model: nn.Module) -> AbstractContextManager[object]:
    """Run the model as it is."""
    return nullcontext()


def planned(plan: Plan) -> Way:
    """Run the model by ``plan``."""

    def by_plan(model: nn.Module) -> AbstractContextManager[object]:
        with warnings.catch_warnings():
            # apply() warns once if the plan changes nothing; trials do not.
            warnings.simplefilter("ignore")
            # So is that its inputs are others.
            return apply(model, replace(plan, inputs=()))

    return by_plan


def compiled_reference(plan: Plan) -> Way:
    """Run the blocks that ``plan`` compiles compiled, and save everything in them and outside of them."""
    assert plan.compiled is not None
    compiled = plan.compiled.reference()
    return planned(replace(plan, compiled=compiled, decisions={}, recorded_modules=(), hooked_modules=(), outline=None))


def checkpointed(paths: Sequence[str]) -> Way:
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
