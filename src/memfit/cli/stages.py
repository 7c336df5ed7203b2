"""Runs the stages of the value grain for the commands, with errors of the user's model shown as theirs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

from memfit.cli.target import Target, load_target
from memfit.cli.user_errors import users_own_errors
from memfit.errors import InvalidParameterError
from memfit.progress import progress_of_command

if TYPE_CHECKING:
    from memfit.fitted import Fitted
    from memfit.graph.model_profile import ModelProfile
    from memfit.graph.plan import FrontierPoint, Plan
    from memfit.graph.verification import MethodResult, Verification
    from memfit.tuning.tuned import Tuned

_WHILE_RUNNING = "while the model ran"


def target_to_run(
    text: str, arguments: Sequence[str] | None, *, takes_sizes: bool = False, takes_batches: bool = False
) -> Target:
    """Return the TARGET, whose model lies on one device.

    ``takes_sizes`` is whether its batch is a function of the size, ``takes_batches`` whether there may be several.
    """
    target = load_target(text, arguments or ())
    if target.batches is not None and not takes_batches:
        raise InvalidParameterError(
            f"{text}: batches of several sizes are for `memfit fit`; return the largest as 'batch' here"
        )
    if isinstance(target.step_arguments["batch"], FunctionType | partial) and not takes_sizes:
        raise InvalidParameterError(
            f"{text}: the batch is a function; that is for `memfit tune`, other commands need a batch"
        )
    devices = sorted({str(parameter.device) for parameter in target.model.parameters()})
    if len(devices) > 1:
        raise InvalidParameterError(
            f"the model of {text} has parameters on {' and '.join(devices)}; a budget is for one device. Move the "
            f"model to one, such as model.to({devices[-1]!r})"
        )
    return target


def engine_in_words() -> str:
    """Return which engine records and replays here, and why where it is the slower one."""
    from memfit.runtime.engine.native_tape import engine_name
    from memfit.runtime.native.native_build import why_not_native

    name = engine_name()
    if name == "C++":
        return name
    return f"Python, about 5 times slower per recorded op ({why_not_native() or 'the one in C++ could not be built'})"


def profiled(target: Target, **options: Any) -> ModelProfile:
    """Return the profile of the TARGET's step, with the options of `memfit.profile`."""
    from memfit.profiling import profile

    with progress_of_command() as progress, users_own_errors(_WHILE_RUNNING):
        return profile(target.model, **target.step_arguments, **options, progress=progress)


def frontier_of(profile: ModelProfile, num_points: int, host_budget: int | str = 0) -> tuple[FrontierPoint, ...]:
    """Return the plans from the fastest to the smallest, at most ``num_points`` of them."""
    from memfit.planning.planner import frontier

    with progress_of_command() as progress:
        progress.stage("planning")
        return frontier(profile, points=num_points, host_budget=host_budget)


def verified(target: Target, plan: Plan) -> Verification:
    """Return what ``plan`` does to the TARGET's step."""
    from memfit.runtime.native.native_build import build_engine
    from memfit.verification.verifying import verify

    with progress_of_command() as progress, users_own_errors(_WHILE_RUNNING):
        build_engine(progress)
        return verify(target.model, plan, **target.step_arguments, progress=progress)


def fitted(target: Target, budget: int | float | str, **options: Any) -> Fitted:
    """Return the TARGET's model fitted into ``budget``, with the other ``options`` of `memfit.fit`."""
    from memfit.fitting import fit

    arguments = target.step_arguments | {"batches": target.batches, "budget": budget}
    with progress_of_command() as progress, users_own_errors(_WHILE_RUNNING):
        return fit(target.model, **arguments, **options, progress=progress)


def tuned(target: Target, budget: int | float | str, **options: Any) -> Tuned:
    """Return the best batch size of the TARGET, whose batch is ``make_batch``, with the options of `memfit.tune`."""
    from memfit.tuning.tune import tune

    arguments = dict(target.step_arguments)
    make_batch = arguments.pop("batch")
    with progress_of_command() as progress, users_own_errors(_WHILE_RUNNING):
        return tune(target.model, make_batch, **arguments, budget=budget, **options, progress=progress)


def compared(target: Target, fitted: Fitted) -> tuple[MethodResult, ...]:
    """Return the plain step, the plan and torch's checkpointing of every block, measured in the same rounds."""
    from memfit.capture.step_arguments import StepArguments
    from memfit.capture.training_step import TrainingStep
    from memfit.verification.comparing import compare

    paths = tuple(block.path for block in fitted.profile.blocks)
    if not paths:
        raise InvalidParameterError(
            f"--compare checkpoints every repeated block, and {type(target.model).__name__} has none; leave it out"
        )
    step = TrainingStep(target.model, StepArguments(**target.step_arguments))
    with progress_of_command() as progress, users_own_errors(_WHILE_RUNNING):
        return compare(step, fitted.plan, paths, progress)
