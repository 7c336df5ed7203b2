"""``apply``: puts a plan on a model, and takes it off again."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from memfit.distributed.wrapped_models import bare_model
from memfit.errors import InvalidParameterError, MemfitError
from memfit.graph.compiled_data.compiled_blocks import CompiledPlan
from memfit.graph.inputs import Input
from memfit.graph.plan import Plan
from memfit.graph.size_plans import SizePlans
from memfit.runtime.applying.fingerprint import fingerprint_of
from memfit.runtime.applying.forward_wrapping import Forward, Runner, is_wrapped, owners_of_wrappers, wrap_forward
from memfit.runtime.applying.plan_switching import PlanSwitch
from memfit.runtime.checks.pass_check import PassCheck
from memfit.runtime.chunked_loss.language_model_head import chunk_loss_of
from memfit.runtime.engine.forward_pass import ForwardPass, UnplannedCalls
from memfit.runtime.engine.native_tape import new_tape
from memfit.runtime.engine.planned_modules import PlannedModule, planned_modules_of
from memfit.runtime.torch_internals import outer_saved_tensors_hooks, refuses_saved_tensors_hooks


def apply(model: nn.Module, plan: Plan) -> Applied:
    """Run the model's training steps by ``plan`` from now on. ``.remove()``, or leaving a ``with``, ends that.

    The model keeps its type, its state dict, its hooks and its attributes; only the ``forward`` of planned modules is
    wrapped, on the instance. Forward passes without gradients run without the plan. With other inputs than those that
    the plan was made for, gradients are right and peaks may differ; larger inputs raise a warning.
    """
    refuse_unfit(model, plan)
    if not plan.recorded_modules and not plan.chunks_loss and plan.compiled is None:
        warnings.warn("the plan saves every value: training runs as before, nothing will change", stacklevel=2)
    return Applied(model, plan, new_tape)


def remove(model: nn.Module) -> None:
    """Remove all plans from the model and its parts. Without any, nothing happens."""
    if not isinstance(model, nn.Module):
        raise InvalidParameterError(f"model is a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        for owner in owners_of_wrappers(module):
            if isinstance(owner, Applied) and owner.is_applied:
                owner.remove()


class Applied:
    """A plan on a model. Also a context manager: leaving it removes the plan."""

    def __init__(
        self, model: nn.Module, plan: Plan, new_tape: Callable[[], ForwardPass], *, warns_of_calls: bool = True
    ) -> None:
        self.model = model
        self.plan = plan
        model = bare_model(model)
        # The chunked loss is part of what the plan was made for: it is inside whatever the plan records.
        self._unwrap: list[Callable[[], None]] | None = [chunk_loss_of(model)] if plan.chunks_loss else []
        modules = dict(model.named_modules())
        self.check = PassCheck(model, plan.inputs, warns_of_calls=warns_of_calls)
        runners = _runners_of(plan, model, new_tape, self.check)
        if not runners and plan.budget_bytes is not None:
            # Without decisions, or with compiled blocks, later inputs and changes can still break the budget.
            runners = {"": self.check.run_model}
        for path, runner in runners.items():
            self._unwrap.append(wrap_forward(modules[path], runner, self))
        if plan.compiled is not None:
            self._compile(plan.compiled)

    def _compile(self, compiled: CompiledPlan) -> None:
        """Let the blocks run compiled."""
        # Importing torch's compiler takes seconds.
        from memfit.runtime.compiling.planned_blocks import PlannedBlocks

        assert self._unwrap is not None
        blocks = PlannedBlocks(bare_model(self.model), compiled.partitions(), owner=self, offloaded=compiled.offloaded)
        self._unwrap.append(blocks.remove)
        self._use_partitions = blocks.use

    @property
    def is_applied(self) -> bool:
        """Whether the plan is still on its model."""
        return self._unwrap is not None

    def remove(self) -> None:
        """Remove the plan and restore the model."""
        if self._unwrap is None:
            raise MemfitError("this plan was already removed from its model; apply() puts it on again")
        while self._unwrap:
            self._unwrap.pop()()
        self._unwrap = None

    def __repr__(self) -> str:
        state = "removed from" if self._unwrap is None else "applied to"
        return f"{type(self).__name__}: {state} {type(self.model).__name__}\n{self.plan!r}"

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._unwrap is not None:
            self.remove()


class AppliedBySize(Applied):
    """Plans for batches of many sizes on a model; each forward pass runs by the plan for the sizes of its inputs.

    ``plan`` is that for the largest size. ``plan_beyond`` is called with inputs that no plan is large enough for, and
    adds one, raises, or returns why there is none; without one they run by the plan for the largest.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: SizePlans,
        plan_beyond: Callable[[tuple[Input, ...]], str | None] | None = None,
    ) -> None:
        self.model = model
        self.plan = plans.largest.plan
        self.plans = plans
        # Taken off last, because the plans' modules may include the head.
        self._unwrap = [chunk_loss_of(bare_model(model))] if self.plan.chunks_loss else []
        self._switch = PlanSwitch(bare_model(model), plans, self._runners_at, plan_beyond, self)
        self._unwrap.append(self._switch.remove)

    def _runners_at(self, place: int) -> dict[str, Runner]:
        return _runners_of(self.plans.entries[place].plan, bare_model(self.model), new_tape, None)


def _runners_of(
    plan: Plan, model: nn.Module, new_tape: Callable[[], ForwardPass], check: PassCheck | None
) -> dict[str, Runner]:
    """Return the wrapper of the forward of each of the plan's modules, the model's own first."""
    passes = _ForwardPasses(new_tape, check)
    regions = planned_modules_of(plan, model)
    if not regions:
        return {}
    # A pass of the model is one pass, whether or not its own ops are recorded, and so is one of a part of the model
    # that the step calls by itself.
    entries = () if plan.outline is None else plan.outline.entries
    runners = {path: passes.runner_at(path) for path in ("", *entries)}
    return runners | {planned.path: passes.runner_at(planned.path, planned) for planned in regions}


class _ForwardPasses:
    """The running forward passes, one per thread, each with its tape."""

    def __init__(self, new_tape: Callable[[], ForwardPass], check: PassCheck | None) -> None:
        self._new_tape = new_tape
        self._check = check
        self._in_thread = threading.local()

    @contextmanager
    def _new_pass(self, report: Callable[[UnplannedCalls | None], None] | None) -> Iterator[ForwardPass]:
        tape = self._in_thread.tape = self._new_tape()
        tape.report = report
        is_complete = False
        try:
            yield tape
            is_complete = True
        finally:
            self._in_thread.tape = None
            tape.close(is_complete=is_complete)

    def runner_at(self, path: str, planned: PlannedModule | None = None) -> Runner:
        """Return the wrapper of the forward of the module at ``path``, with which a pass may begin."""

        def run(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.is_grad_enabled() or refuses_saved_tensors_hooks():
                return forward(*args, **kwargs)
            tape: ForwardPass | None = getattr(self._in_thread, "tape", None)
            if tape is not None:
                return _run_in(tape, planned, forward, args, kwargs)
            if path and outer_saved_tensors_hooks() is not None:
                # A part of the model that is called by itself under such hooks: torch.utils.checkpoint recomputes it.
                return forward(*args, **kwargs)
            report = None
            if not path and self._check is not None:
                self._check.see(forward, args, kwargs)
                report = self._check.calls_of_pass(forward, args, kwargs)
            with self._new_pass(report) as tape:
                return _run_in(tape, planned, forward, args, kwargs)

        return run


def _run_in(
    tape: ForwardPass, planned: PlannedModule | None, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return forward(*args, **kwargs) if planned is None else tape.run(planned, forward, args, kwargs)


def refuse_unfit(model: nn.Module, plan: Plan) -> None:
    """Raise unless ``plan`` is one for ``model``, which has no plan yet."""
    if not isinstance(model, nn.Module):
        raise InvalidParameterError(f"model is a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(plan, Plan):
        raise InvalidParameterError(f"plan is a Plan as memfit.plan() returns it, got {type(plan).__name__}")
    if any(is_wrapped(module) for module in model.modules()):
        raise InvalidParameterError(
            f"this {type(model).__name__} (or a part of it) already has a plan; call memfit.remove(model) first"
        )
    modules = dict(bare_model(model).named_modules())
    planned = (*plan.recorded_modules, *plan.hooked_modules, *(plan.compiled.choice if plan.compiled else ()))
    missing = [path for path in planned if path not in modules]
    if missing:
        raise InvalidParameterError(
            f"this plan is for another model: {type(model).__name__} has no module {missing[0]!r}; "
            "profile this model and plan for it"
        )
    if plan.fingerprint != fingerprint_of(model):
        raise InvalidParameterError(
            f"this plan is for another model: the modules or parameter shapes of this {type(model).__name__} differ "
            "from those it was made for; profile this model and plan for it"
        )
