"""``tune``: finds the batch size that trains fastest within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from memfit.capture.step_arguments import GradientsMode, Loss, StepArguments, StepFunction
from memfit.capture.training_step import TrainingStep
from memfit.errors import InfeasibleBudgetError, InvalidParameterError, MemfitError, VerificationError
from memfit.fitted import Fitted
from memfit.fitting import fit
from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import Plan
from memfit.graph.summaries import html_summary, text_summary
from memfit.planning.budgets import BudgetLike, HostBudgetLike, budget_in_bytes, checked_budget, checked_host_budget
from memfit.planning.planner import plan as plan_step
from memfit.profiling import ProfileMode, profile_of_step, refuse_unfit
from memfit.progress import Progress, progress_on_terminal
from memfit.runtime.applying.batch_tensors import named_tensors
from memfit.runtime.applying.forward_wrapping import plans_set_aside
from memfit.runtime.chunked_loss.language_model_head import head_of
from memfit.runtime.native.native_build import build_engine
from memfit.sizes.scaled_profiles import ScaledProfiles
from memfit.units import format_bytes, format_rate, format_seconds
from memfit.validation import shown, whole_number
from memfit.verification.methods import planned
from memfit.verification.trials import Trials

# Sizes that are looked for are at most this factor apart around the best one.
_CLOSEST_FACTOR = 1.1
_MOST_DOUBLINGS = 24
# So many of the sizes that are predicted to be fastest are run.
_MOST_MEASURED = 3
# A real step is measured at two sizes: the larger takes at most this share of the budget, and at most so many times
# the bytes of the smallest.
_MEASURED_SHARE = 0.5
_MOST_MEASURED_GROWTH = 64


@dataclass(frozen=True, slots=True)
class TunedSize:
    """One batch size that was tried.

    ``peak_bytes``, ``seconds`` of a step and ``throughput`` in samples per second were measured where ``is_measured``,
    else they are predicted. ``plan`` is None for a size that no plan keeps within the budget; it has no seconds, and
    its throughput is 0. With a global batch, ``accumulation`` is how many steps make up one.
    """

    size: int
    peak_bytes: int | None
    seconds: float | None
    throughput: float
    plan: Plan | None
    is_measured: bool = False
    accumulation: int = 1

    @property
    def peak(self) -> int | None:
        """The peak in bytes."""
        return self.peak_bytes

    def __str__(self) -> str:
        if self.plan is None or self.peak_bytes is None or self.seconds is None:
            return "not within the budget"
        steps = f", {self.accumulation} steps" if self.accumulation > 1 else ""
        how = "measured" if self.is_measured else "predicted"
        rate, peak = format_rate(self.throughput), format_bytes(self.peak_bytes)
        return f"{rate} samples/s, {peak}, {format_seconds(self.seconds)} per step{steps} ({how})"


@dataclass(frozen=True, slots=True, repr=False)
class Tuned:
    """The batch size with the most samples per second within the budget, and what was tried.

    ``throughput`` is in samples per second. ``fitted`` has the plan for that size, which is applied to the model.
    ``accumulation`` is how many steps of that size make up the global batch; 1 where none was given.
    """

    size: int
    throughput: float
    fitted: Fitted
    table: tuple[TunedSize, ...]
    accumulation: int = 1

    def summary_lines(self) -> dict[str, str]:
        """Return the result and a line for each size that was tried."""
        lines = {"size": f"{self.size}, {format_rate(self.throughput)} samples/s"}
        if self.accumulation > 1:
            lines["steps"] = f"{self.accumulation} for a global batch of {self.accumulation * self.size}"
        return lines | {f"{row.size}": str(row) for row in self.table}

    def __repr__(self) -> str:
        return text_summary("Tuned", self.summary_lines())

    def _repr_html_(self) -> str:
        return html_summary("Tuned", self.summary_lines())

    def document(self) -> dict[str, Any]:
        """Return the result as plain data: what ``--json`` prints, and the points of a curve."""
        return {
            "size": self.size,
            "throughput": self.throughput,
            "accumulation": self.accumulation,
            "budget_bytes": self.fitted.plan.budget_bytes,
            "table": [
                {
                    "size": row.size,
                    "peak_bytes": row.peak_bytes,
                    "seconds": row.seconds,
                    "throughput": row.throughput,
                    "predicted_overhead": None if row.plan is None else row.plan.predicted_overhead,
                    "is_measured": row.is_measured,
                    "accumulation": row.accumulation,
                }
                for row in self.table
            ],
        }


def tune(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    *,
    budget: BudgetLike,
    sizes: Iterable[int] | None = None,
    global_batch: int | None = None,
    loss: Loss | None = None,
    targets: Any = None,
    step: StepFunction | None = None,
    optimizer: Any = None,
    gradients: GradientsMode = "fresh",
    host_budget: HostBudgetLike = 0,
    compile: bool | Literal["auto"] = False,
    chunk_loss: bool = False,
    progress: Progress | None = None,
) -> Tuned:
    """Return the batch size that trains the most samples per second within ``budget``, and apply the plan for it.

    ``make_batch(size)`` returns a batch of so many samples, ``targets(size)`` its targets where the loss takes them;
    the other step arguments are as for `profile`, ``budget`` and the rest as for `fit`. Without ``sizes``, they are
    doubled from 1 until no plan keeps the step within the budget, then looked for more closely around the best. Bytes
    of each size are those of a step on fake tensors, so that a size may be tried whose plain step is too large to run;
    seconds follow from two sizes that are measured. The sizes that are predicted to be fastest are run by their plans.
    With a ``global_batch``, only sizes that divide it count, and ``Tuned.accumulation`` steps make up one; steps are
    then measured with gradients that exist before.

    Where nothing fits, or ``make_batch`` raises, there is an error and the model is as it was.
    """
    refuse_unfit(model, "real")
    checked_budget(budget)
    checked_host_budget(host_budget)
    if not callable(make_batch):
        raise InvalidParameterError(
            "make_batch is a function that returns a batch of a given size, such as lambda size: torch.randn(size, 8); "
            f"got {shown(make_batch)}"
        )
    if chunk_loss:
        head_of(model)
    arguments: dict[str, Any] = {"loss": loss, "step": step, "optimizer": optimizer, "gradients": gradients}
    wanted = None if sizes is None else _checked_sizes(sizes)
    if global_batch is not None:
        global_batch = whole_number(global_batch, "global_batch", minimum=1)
    batches = _Batches(make_batch, targets, arguments, global_batch)
    with progress_on_terminal() if progress is None else nullcontext(progress) as shown_progress:
        build_engine(shown_progress)
        tuning = _Tuning(model, batches, budget, host_budget, shown_progress, chunk_loss=chunk_loss)
        rows = tuning.rows(wanted, global_batch)

        def fit_size(size: int) -> Fitted:
            given = batches.at(size)
            options: dict[str, Any] = {"host_budget": host_budget, "compile": compile, "chunk_loss": chunk_loss}
            return fit(
                model,
                given.batch,
                budget=budget,
                targets=given.targets,
                **arguments | {"gradients": given.gradients},
                **options,
                progress=shown_progress,
            )

        return _fitted_best(rows, fit_size)


class _Batches:
    """The user's batches by size, checked to have one form."""

    def __init__(
        self, make_batch: Callable[[int], Any], targets: Any, arguments: dict[str, Any], global_batch: int | None
    ) -> None:
        self._make_batch = make_batch
        self._targets = targets
        self._arguments = arguments
        self._global_batch = global_batch
        self._form: list[tuple[str, torch.dtype, int]] | None = None
        self._first_size = 0

    def at(self, size: int) -> StepArguments:
        """Return the step arguments with a batch of that size."""
        batch = self._called("make_batch", self._make_batch, size)
        targets = self._called("targets", self._targets, size) if callable(self._targets) else self._targets
        if batch is None:
            raise InvalidParameterError(f"make_batch({size}) returned None; it returns a batch of {size} samples")
        form = [(name, tensor.dtype, tensor.dim()) for name, tensor in named_tensors((batch, targets))]
        if self._form is None:
            self._form, self._first_size = form, size
        if form != self._form:
            raise InvalidParameterError(
                f"batches of all sizes must have the same tensors, and those of make_batch({self._first_size}) and "
                f"make_batch({size}) differ in more than sizes: {_form_in_words(self._form)} and {_form_in_words(form)}"
            )
        arguments = dict(self._arguments)
        if self._global_batch is not None and size < self._global_batch:
            # All but the first of the steps that make up a global batch begin with gradients.
            arguments["gradients"] = "kept"
        return StepArguments(batch=batch, targets=targets, **arguments)

    def _called(self, name: str, function: Callable[[int], Any], size: int) -> Any:
        try:
            return function(size)
        except Exception as error:
            raise InvalidParameterError(
                f"{name}({size}) raised {type(error).__name__}: {error}. It is called with sizes that memfit tries; "
                "give sizes= to choose them. The model is as it was"
            ) from error


def _form_in_words(form: list[tuple[str, torch.dtype, int]]) -> str:
    words = [f"{str(dtype).removeprefix('torch.')} with {num_dims} dimensions" for _, dtype, num_dims in form]
    return ", ".join(words) or "no tensors"


class _Candidate(NamedTuple):
    """A size, its plan, and what the step is predicted to take; without a plan, the error that says why."""

    size: int
    plan: Plan | None
    seconds: float
    error: InfeasibleBudgetError | None = None

    @property
    def throughput(self) -> float:
        return self.size / self.seconds if self.plan is not None and self.seconds else 0.0


class _Tuning:
    """Predicts what each size takes, and runs the best."""

    def __init__(
        self,
        model: nn.Module,
        batches: _Batches,
        budget: BudgetLike,
        host_budget: HostBudgetLike,
        progress: Progress,
        *,
        chunk_loss: bool,
    ) -> None:
        self._model = model
        self._batches = batches
        self._budget = budget
        self._host_budget = host_budget
        self._progress = progress
        self._chunk_loss = chunk_loss
        self._candidates: dict[int, _Candidate] = {}
        self._budget_bytes = 0
        self._profiles: ScaledProfiles | None = None

    def rows(self, sizes: list[int] | None, global_batch: int | None) -> list[TunedSize]:
        """Return the sizes that were tried, ascending, the fastest of them measured."""
        allowed = self._divisors(global_batch) if sizes is None and global_batch is not None else sizes
        if allowed is not None and global_batch is not None:
            allowed = [size for size in allowed if global_batch % size == 0]
            if not allowed:
                raise InvalidParameterError(
                    f"none of the sizes divides the global batch of {global_batch}; got {sizes}"
                )
        self._profiles = self._measured_profiles(allowed)
        self._progress.stage("planning for sizes")
        if allowed is None:
            self._search()
        else:
            for size in allowed:
                if self._candidate(size).plan is None and sizes is None:
                    break
        feasible = [each for each in self._candidates.values() if each.plan is not None]
        if not feasible:
            smallest = min(self._candidates.values())
            assert smallest.error is not None
            raise InfeasibleBudgetError(
                f"not even a batch of size {smallest.size} can be kept within {format_bytes(self._budget_bytes)}: "
                f"{smallest.error}",
                minimum_bytes=smallest.error.minimum_bytes,
            )
        rows = {each.size: _predicted(each, global_batch) for each in self._candidates.values()}
        fastest = sorted(feasible, key=lambda each: each.throughput, reverse=True)
        for candidate in fastest[:_MOST_MEASURED]:
            rows[candidate.size] = self._measured_row(candidate, rows[candidate.size])
        return [rows[size] for size in sorted(rows)]

    @staticmethod
    def _divisors(number: int) -> list[int]:
        return [size for size in range(1, number + 1) if number % size == 0]

    def _measured_profiles(self, allowed: list[int] | None) -> ScaledProfiles:
        """Measure the step at the smallest size, and at one that is as large as fits well within the budget."""
        self._progress.stage("profiling batches")
        first = 1 if allowed is None else allowed[0]
        measured = {first: self._real_or_fake(first)}
        self._budget_bytes = budget_in_bytes(self._budget, measured[first])
        static_bytes, size = self._fake(first).peak_bytes, first
        for _ in range(_MOST_DOUBLINGS):
            larger = 2 * size if allowed is None else next((each for each in allowed if each > size), None)
            if larger is None:
                break
            peak_bytes = self._fake(larger).peak_bytes
            # Beyond some bytes, a larger step is no better a measure and takes longer.
            if peak_bytes > _MEASURED_SHARE * self._budget_bytes or peak_bytes > _MOST_MEASURED_GROWTH * static_bytes:
                break
            size = larger
        if size == first:
            later = 2 * first if allowed is None else next((each for each in allowed if each > first), first)
            size = later if self._fake(later).peak_bytes <= self._most_real_bytes(measured[first]) else first
        if size != first:
            measured[size] = self._real_or_fake(size)
        if len({profile.measured_with for profile in measured.values()}) > 1:
            measured = {each: profile for each, profile in measured.items() if profile.measured_with == "real step"}
        return ScaledProfiles(measured, self._fake, self._real_or_fake)

    def _most_real_bytes(self, profile: ModelProfile) -> int:
        return max(self._budget_bytes, profile.peak_bytes if profile.free_bytes is None else profile.free_bytes)

    def _fake(self, size: int) -> ModelProfile:
        return self._profiled(size, "fake")

    def _real_or_fake(self, size: int) -> ModelProfile:
        try:
            return self._profiled(size, "real")
        except MemfitError as error:
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
        # Outside of the handler, because an error under way keeps alive what the failed step had made.
        return self._profiled(size, "fake")

    def _profiled(self, size: int, mode: ProfileMode) -> ModelProfile:
        step = TrainingStep(self._model, self._batches.at(size))
        return profile_of_step(step, mode, chunk_loss=self._chunk_loss)

    def _candidate(self, size: int) -> _Candidate:
        if size not in self._candidates:
            assert self._profiles is not None
            profile = self._profiles.at(size)
            try:
                plan = plan_step(profile, budget=self._budget_bytes, host_budget=self._host_budget)
            except InfeasibleBudgetError as error:
                self._candidates[size] = _Candidate(size, None, math.inf, error)
            else:
                seconds = profile.step_seconds * (1 + plan.predicted_overhead)
                self._candidates[size] = _Candidate(size, plan, seconds)
        return self._candidates[size]

    def _search(self) -> None:
        """Double the size until none fits, then look more closely around the best."""
        size = 1
        for _ in range(_MOST_DOUBLINGS):
            if self._candidate(size).plan is None:
                break
            size *= 2
        while True:
            best = max(self._candidates.values(), key=lambda each: each.throughput).size
            sizes = sorted(self._candidates)
            place = sizes.index(best)
            pairs = [(low, high) for low, high in pairwise(sizes) if best in (low, high)]
            gaps = [pair for pair in pairs if pair[1] > _CLOSEST_FACTOR * pair[0] and pair[1] - pair[0] > 1]
            if not gaps or self._candidates[sizes[place]].plan is None:
                return
            low, high = max(gaps, key=lambda pair: pair[1] / pair[0])
            self._candidate((low + high) // 2)

    def _measured_row(self, candidate: _Candidate, row: TunedSize) -> TunedSize:
        """Run the step by its plan; where it runs out of memory, or over the budget, the size does not count."""
        assert candidate.plan is not None
        try:
            with plans_set_aside(self._model):
                trials = Trials(TrainingStep(self._model, self._batches.at(candidate.size)), plain_fits=False)
                with trials.kept_optimizer():
                    trials.warm_up(planned(candidate.plan))
                    peak_bytes = trials.measured(planned(candidate.plan)).peak_bytes
                    (seconds,) = trials.seconds_in_turns((planned(candidate.plan),), self._progress)
        except torch.OutOfMemoryError:
            return replace(row, plan=None, seconds=None, throughput=0.0, is_measured=True)
        typical = sorted(seconds)[len(seconds) // 2]
        return replace(
            row, peak_bytes=peak_bytes, seconds=typical, throughput=candidate.size / typical, is_measured=True
        )


def _predicted(candidate: _Candidate, global_batch: int | None) -> TunedSize:
    accumulation = 1 if global_batch is None else global_batch // candidate.size
    if candidate.plan is None:
        return TunedSize(candidate.size, None, None, 0.0, None, accumulation=accumulation)
    peak_bytes = candidate.plan.predicted_peak_bytes
    return TunedSize(
        candidate.size, peak_bytes, candidate.seconds, candidate.throughput, candidate.plan, accumulation=accumulation
    )


def _fitted_best(rows: list[TunedSize], fit_size: Callable[[int], Fitted]) -> Tuned:
    """Fit the fastest size that was measured; where that fails after all, the next."""
    failed: MemfitError | None = None
    for row in sorted(rows, key=lambda row: (row.is_measured, row.throughput), reverse=True):
        if row.plan is None:
            continue
        try:
            fitted = fit_size(row.size)
        except (InfeasibleBudgetError, VerificationError) as error:
            failed = error
            continue
        verification = fitted.verification
        seconds = verification.step_seconds
        chosen = replace(
            row,
            peak_bytes=verification.peak_bytes,
            seconds=seconds,
            throughput=row.size / seconds,
            plan=fitted.plan,
            is_measured=True,
        )
        table = tuple(chosen if each.size == row.size else each for each in rows)
        return Tuned(row.size, chosen.throughput, fitted, table, row.accumulation)
    assert failed is not None
    raise failed


def _checked_sizes(sizes: object) -> list[int]:
    try:
        given = list(sizes)  # type: ignore[call-overload]
    except TypeError:
        given = []
    if not given:
        raise InvalidParameterError(f"sizes must be a list of batch sizes, such as [4, 8, 16]; got {shown(sizes)}")
    return sorted({whole_number(size, "sizes", minimum=1) for size in given})
