"""``fit``: profile, plan, verify and apply in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from torch import nn

from memfit.budgets import BudgetLike, HostBudgetLike, checked_budget, checked_host_budget
from memfit.capture.step_arguments import GradientsMode, Loss, StepArguments, StepFunction
from memfit.capture.training_step import TrainingStep
from memfit.errors import InfeasibleBudgetError, InvalidParameterError, VerificationError
from memfit.fitted import Fitted
from memfit.graph.compiled_data.compiled_blocks import CompiledProfile
from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import Plan
from memfit.graph.verification import Verification
from memfit.planning.planner import plan as plan_step
from memfit.profiling import profile_of_real_or_fake_step, with_compiled_blocks
from memfit.profiling import refuse_unfit as refuse_unfit_to_profile
from memfit.progress import Progress, progress_on_terminal
from memfit.runtime.applying.apply import remove
from memfit.runtime.checks.model_changes import checkpointed_in, refuse_compiled_as_a_whole, warn_of_checkpointing
from memfit.runtime.checks.pass_check import warn_of_calls
from memfit.runtime.chunked_loss.language_model_head import head_of
from memfit.runtime.native.native_build import build_engine
from memfit.sizes.batch_form import BatchForm
from memfit.sizes.compiled_sizes import fit_compiled_by_size
from memfit.sizes.fitting_by_size import fit_by_size
from memfit.units import format_bytes
from memfit.verification.verifying import faster_of, verify_step

# Predicted and measured peaks may differ by this share before users are warned.
_TOLERATED_PEAK_MISS = 0.05
# Each plan leaves room for how far the last one missed its prediction, so that one repetition is the rule.
_MOST_PLANS = 4
# A plan that changes bits must be faster by more than two measurements of one step differ by.
_TIMING_NOISE = 0.02
# Logits and their gradient are worth a hint where they are this share of the smallest peak.
_LARGE_LOGITS_SHARE = 0.1
_Made = TypeVar("_Made")


def fit(
    model: nn.Module,
    batch: Any = None,
    *,
    budget: BudgetLike,
    loss: Loss | None = None,
    targets: Any = None,
    step: StepFunction | None = None,
    optimizer: Any = None,
    gradients: GradientsMode = "fresh",
    host_budget: HostBudgetLike = 0,
    compile: bool | Literal["auto"] = False,
    chunk_loss: bool = False,
    batches: Sequence[Any] | None = None,
    progress: Progress | None = None,
) -> Fitted:
    """Make the training steps of ``model`` stay within ``budget`` bytes from now on, as fast as that can be.

    The step arguments are as for `profile`, ``budget`` is as for `plan`: the whole peak of the step. So is
    ``host_budget``, the host's memory that values may be offloaded to; on a CPU there is nowhere to offload to.
    The plan is tried before it is put on the model, and one that breaks the budget or changes gradients never is. It
    replaces a plan that an earlier call put there. The result has the ``profile``, the ``plan`` and the
    ``verification``; its ``remove()`` ends it.

    With ``chunk_loss``, the plan may compute a language model's output projection and cross-entropy in chunks of
    tokens, so that the logits never exist as a whole: where that is faster at the budget, or needed to keep it.
    Logits are computed when they are read. Sums run in another order, so that gradients are compared within a
    tolerance (``Verification.gradient_tolerance``). Models of transformers need no change; others call their
    ``lm_head``, and `torch.nn.functional.cross_entropy` on what it returns, or `linear_cross_entropy` directly.

    ``batches`` in place of ``batch`` are two or three batches of different sizes, such as ``[short, long]``: the result
    has a plan for each size up to the largest, and each forward pass runs by that for the sizes that it is called with.
    Short batches run plain, long ones recompute more. ``targets`` is then a list with one entry for each batch. A batch
    that is larger than all of them is planned for when it comes, or refused with the largest size that fits. With
    ``compile``, each of the given batches has a plan of its own, and a step runs by that of the smallest that is at
    least as large; a larger one than all warns.

    With ``compile=True``, the repeated blocks run compiled, and the plan says what each of them saves; blocks that you
    compiled are planned as well. Gradients are compared with those of the compiled step that saves everything.
    ``compile="auto"`` tries a plan of each kind and keeps the faster.

    A terminal shows a progress bar; ``progress`` takes its place.
    """
    _refuse_unfit(model)
    checked_budget(budget)
    checked_host_budget(host_budget)
    checked_compile(compile)
    if compile:
        refuse_compiled_as_a_whole(model)
    if chunk_loss:
        head_of(model)
    warn_of_checkpointing(model, stacklevel=2)
    if batches is not None and batch is not None:
        raise InvalidParameterError("give either batch or batches, which has batches of several sizes, not both")
    arguments = StepArguments(batch if batches is None else batches, loss, targets, step, optimizer, gradients)
    form = None if batches is None else BatchForm(arguments, batches)
    with progress_on_terminal() if progress is None else nullcontext(progress) as shown:
        build_engine(shown)

        def fit_one(given: StepArguments, compile: bool | Literal["auto"]) -> Fitted:
            fitting = _Fitting(TrainingStep(model, given), budget, host_budget, shown, chunk_loss=chunk_loss)
            return fitting.fitted(compile)

        if form is None:
            return fit_one(arguments, compile)
        if compile:
            compiled = fit_compiled_by_size(model, form, compile, fit_one)
            if compiled is not None:
                return compiled
        return fit_by_size(model, form, host_budget, lambda given: fit_one(given, False), shown)


class _Choice(NamedTuple):
    """A profile, and the plan for it."""

    profile: ModelProfile
    plan: Plan

    @property
    def step_seconds(self) -> float:
        return self.profile.step_seconds * (1 + self.plan.predicted_overhead)


class _Tried(NamedTuple):
    """A plan, what it was made from, and what it did when it was tried."""

    profile: ModelProfile
    plan: Plan
    verification: Verification


class _Fitting:
    """Plans a step for a budget, and tries the plans."""

    def __init__(
        self,
        step: TrainingStep,
        budget: BudgetLike,
        host_budget: HostBudgetLike,
        progress: Progress,
        *,
        chunk_loss: bool,
    ) -> None:
        self._step = step
        self._budget = budget
        self._host_budget = host_budget
        self._progress = progress
        self._chunk_loss = chunk_loss

    def fitted(self, compile: bool | Literal["auto"]) -> Fitted:
        """Apply the best plan; raise where that changes gradients or is above the budget."""
        chosen = self._best(compile)
        self._step.ranks.decided(lambda: _refuse_broken(chosen.verification))
        _warn_of_surprises(chosen)
        remove(self._step.model)
        return Fitted(self._step.model, chosen.plan, chosen.profile, chosen.verification)

    def _best(self, compile: bool | Literal["auto"]) -> _Tried:
        """Return what was tried in eager, with compiled blocks, or of both the faster that is within the budget."""
        self._progress.stage("profiling the plain step")
        plain = profile_of_real_or_fake_step(self._step)
        compiled = self._compiled_profiles(plain) if compile else []
        if not compiled:
            return self._tried(self._in_eager(plain))
        if compile is True:
            return self._tried(self._compiled(compiled))
        tried = _feasible((lambda: self._tried(self._in_eager(plain)), lambda: self._tried(self._compiled(compiled))))
        holding = [each for each in tried if each.verification.holds] or tried[:1]
        return holding[faster_of(self._step, [each.plan for each in holding], self._progress)]

    def _in_eager(self, plain: ModelProfile) -> _Choice:
        """Return the fastest plan in eager: of the plain step, or where asked for, of one with a chunked loss."""
        self._progress.stage("planning")
        if self._chunk_loss:
            choices = _feasible((lambda: self._choice(plain), self._with_chunked_loss))
            return _faster_loss(*choices) if len(choices) > 1 else choices[0]
        try:
            return self._choice(plain)
        except InfeasibleBudgetError as error:
            raise _with_advice(error, self._step.model, plain) from None

    def _with_chunked_loss(self) -> _Choice:
        self._progress.stage("profiling the step with a chunked loss")
        chunked = profile_of_real_or_fake_step(self._step, chunk_loss=True)
        if not chunked.chunks_loss:
            warnings.warn(
                f"chunk_loss=True changes nothing: {type(self._step.model).__name__} uses its logits for more than "
                "their cross-entropy, so that they are computed whole; the loss is computed as before",
                stacklevel=8,
            )
        self._progress.stage("planning with a chunked loss")
        return self._choice(chunked)

    def _choice(self, profile: ModelProfile) -> _Choice:
        return _Choice(profile, self._planned(profile, self._budget))

    def _planned(self, profile: ModelProfile, budget: BudgetLike) -> Plan:
        """Return the plan, made in one process for all that run the step together."""
        return self._step.ranks.decided(lambda: plan_step(profile, budget=budget, host_budget=self._host_budget))

    def _compiled(self, profiles: Sequence[ModelProfile]) -> _Choice:
        """Return the fastest plan with compiled blocks, made in one process for all that run the step together."""

        def choice_of(profile: ModelProfile) -> _Choice:
            return _Choice(profile, plan_step(profile, budget=self._budget, host_budget=self._host_budget))

        return self._step.ranks.decided(
            lambda: min(
                _feasible([partial(choice_of, profile) for profile in profiles]),
                key=lambda choice: choice.plan.predicted_overhead,
            )
        )

    def _compiled_profiles(self, plain: ModelProfile) -> list[ModelProfile]:
        """Return the step measured with compiled blocks, where asked for also with a chunked loss; warn of the rest."""
        profiles = [with_compiled_blocks(plain, self._step, self._progress)]
        if self._chunk_loss:
            unchunked = profiles[0].compiled
            assert unchunked is not None
            # Partitions for which there was no memory beside the whole logits may fit beside a chunk of them.
            known = unchunked if unchunked.has_all_partitions else None
            chunked = with_compiled_blocks(plain, self._step, self._progress, chunk_loss=True, of_same_blocks=known)
            if chunked.chunks_loss:
                profiles.append(chunked)
        found = [(profile, profile.compiled) for profile in profiles if profile.compiled is not None]
        _warn_of_what_is_not_compiled(max((each for _, each in found), key=lambda each: len(each.kinds)))
        # All are compared with one step: the plain one, where that could be run.
        plain_seconds = next((each.plain_seconds for _, each in found if each.plain_seconds), 0.0)
        return [
            replace(profile, compiled=replace(each, plain_seconds=plain_seconds))
            for profile, each in found
            if each.kinds
        ]

    def _tried(self, choice: _Choice) -> _Tried:
        profile, plan = choice
        verification = verify_step(self._step, plan, self._progress)
        for _ in range(1, _MOST_PLANS):
            if all(self._step.ranks.gathered(verification.within_budget)):
                break
            self._progress.stage("planning again")
            plan = self._plan_with_more_room(profile, plan, verification)
            verification = verify_step(self._step, plan, self._progress)
        return _Tried(profile, plan, verification)

    def _plan_with_more_room(self, profile: ModelProfile, plan: Plan, verification: Verification) -> Plan:
        """Return a plan whose predicted peak leaves room for how far the last one was missed."""
        assert plan.budget_bytes is not None
        # That of another process may be the one that was missed.
        miss_bytes = 0 if verification.within_budget else verification.peak_bytes - plan.predicted_peak_bytes
        try:
            tighter = self._planned(profile, max(0, plan.budget_bytes - miss_bytes))
        except InfeasibleBudgetError as error:
            minimum_bytes = error.minimum_bytes + miss_bytes
            differing = verification.not_as_planned
            because = f", because the planned step differs from the profiled one ({differing})" if differing else ""
            raise InfeasibleBudgetError(
                f"the smallest budget is {format_bytes(minimum_bytes)} ({minimum_bytes} bytes), and the given one is "
                f"{format_bytes(plan.budget_bytes)}: measured peaks are {format_bytes(miss_bytes)} above what the "
                f"profile predicts{because}, and plans have to leave room for that",
                minimum_bytes=minimum_bytes,
            ) from error
        return replace(tighter, budget_bytes=plan.budget_bytes)


def _feasible(ways: Iterable[Callable[[], _Made]]) -> list[_Made]:
    """Return what those of ``ways`` make for which the budget is large enough; raise where it is for none."""
    made: list[_Made] = []
    infeasible: list[InfeasibleBudgetError] = []
    for make in ways:
        try:
            made.append(make())
        except InfeasibleBudgetError as error:
            infeasible.append(error)
    if not made:
        raise min(infeasible, key=lambda error: error.minimum_bytes)
    return made


def _faster_loss(whole: _Choice, in_chunks: _Choice) -> _Choice:
    """Return the chunked loss where that is faster by more than measurements differ by."""
    # Estimated seconds are not compared with measured ones: what could be run is chosen.
    if whole.profile.measured_with != in_chunks.profile.measured_with:
        return in_chunks
    is_faster = in_chunks.step_seconds < whole.step_seconds * (1 - _TIMING_NOISE)
    return in_chunks if in_chunks.profile.chunks_loss and is_faster else whole


def checked_compile(compile: object) -> None:
    """Raise unless ``compile`` is True, False or "auto"."""
    if compile not in (True, False, "auto"):
        raise InvalidParameterError(f'compile is True, False or "auto"; got {compile!r}')


def _warn_of_what_is_not_compiled(compiled: CompiledProfile) -> None:
    if compiled.not_compiled:
        path, reason = next(iter(compiled.not_compiled.items()))
        warnings.warn(
            f"{len(compiled.not_compiled)} blocks stay in eager, since they cannot be compiled as a whole; "
            f"{path!r}: {reason}",
            stacklevel=7,
        )
    elif not compiled.kinds:
        warnings.warn("the model has no repeated blocks to compile; it is planned in eager", stacklevel=7)


def _with_advice(error: InfeasibleBudgetError, model: nn.Module, profile: ModelProfile) -> InfeasibleBudgetError:
    """Return the error with a hint at ``chunk_loss``, where logits are a large part of the smallest peak.

    Where blocks are recomputed as a whole, which leaves little to plan, it says that instead.
    """
    checkpointed = checkpointed_in(model)
    if checkpointed is not None:
        return InfeasibleBudgetError(
            f"{error}. The model uses gradient checkpointing ({checkpointed}), and memfit cannot plan inside blocks "
            "that are recomputed as a whole: switch it off",
            minimum_bytes=error.minimum_bytes,
        )
    try:
        head = head_of(model)
    except InvalidParameterError:
        return error
    made = [value for op in profile.ops if op.module == head.path for value in op.outputs if value is not None]
    logits_bytes = max((profile.values[value].num_bytes for value in made), default=0)
    if 2 * logits_bytes < _LARGE_LOGITS_SHARE * error.minimum_bytes:
        return error
    return InfeasibleBudgetError(
        f"{error}. The logits take {format_bytes(logits_bytes)}, and as much again in the backward pass: with "
        "chunk_loss=True they are computed in chunks of tokens, where the model does not change them before the loss",
        minimum_bytes=error.minimum_bytes,
    )


def _refuse_broken(verification: Verification) -> None:
    if not verification.gradients_hold and verification.plain_differs:
        raise VerificationError(
            "the plain step differs from itself from run to run: its gradients by "
            f"{verification.plain_gradient_distance:.2g} of their length, so that nothing can be proven of the planned "
            "step; the plan was not applied, the model runs as before. What the step reads changes between runs where "
            "memfit cannot put it back: state outside the model (globals, closures, files, the time), or random "
            "numbers from elsewhere than torch, Python, NumPy and generators in the model's attributes. Keep it in "
            "attributes of the model, or turn it off for fit()"
        )
    if not verification.gradients_hold:
        names = ", ".join(verification.differing_parameters[:3])
        more = len(verification.differing_parameters) - 3
        raise VerificationError(
            f"the planned step changed the gradients of {names}{f' and {more} more' if more > 0 else ''} "
            f"(largest relative error {verification.max_gradient_error:.2g}), so the plan was not applied; the model "
            "runs as before. This should not happen: please report it with the model"
        )
    if not verification.within_budget:
        assert verification.budget_bytes is not None
        raise VerificationError(
            f"the planned step peaked at {format_bytes(verification.peak_bytes)}, over the budget of "
            f"{format_bytes(verification.budget_bytes)}, after {_MOST_PLANS} plans; the model runs as before. Peaks "
            "that change from step to step cannot be planned for: give a larger budget, or a batch of the largest size"
        )


def _warn_of_surprises(tried: _Tried) -> None:
    profile, plan, verification = tried
    if not plan.changes_anything and not plan.chunks_loss:
        warnings.warn(
            f"the plan changes nothing: the plain step peaks at {format_bytes(profile.peak_bytes)}, which is within "
            f"the budget of {format_bytes(plan.budget_bytes or 0)}",
            stacklevel=5,
        )
    if verification.not_as_planned is not None:
        warn_of_calls(verification.not_as_planned, stacklevel=5)
    if abs(verification.peak_miss) > _TOLERATED_PEAK_MISS:
        side = "above" if verification.peak_miss > 0 else "below"
        warnings.warn(
            f"the measured peak, {format_bytes(verification.peak_bytes)}, is {abs(verification.peak_miss):.0%} "
            f"{side} the predicted {format_bytes(plan.predicted_peak_bytes)}; "
            "profile with the batch and the optimizer that you train with",
            stacklevel=5,
        )


def _refuse_unfit(model: object) -> None:
    devices = sorted({str(each.device) for each in model.parameters()}) if isinstance(model, nn.Module) else []
    if len(devices) > 1:
        raise InvalidParameterError(
            f"this {type(model).__name__} has parameters on {' and '.join(devices)}; a budget is for one device. Move "
            f"the model to one, such as model.to({devices[-1]!r})"
        )
    refuse_unfit_to_profile(model, "real")
