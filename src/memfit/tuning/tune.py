"""``tune``: finds the batch size that trains fastest within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from memfit.budgets import BudgetLike, HostBudgetLike, checked_budget, checked_host_budget
from memfit.capture.step_arguments import GradientsMode, Loss, StepFunction
from memfit.capture.training_step import TrainingStep
from memfit.distributed.ranks import ranks_of
from memfit.errors import InfeasibleBudgetError, InvalidParameterError, MemfitError, VerificationError
from memfit.fitted import Fitted
from memfit.fitting import checked_compile, fit
from memfit.graph.model_profile import ModelProfile
from memfit.profiling import ProfileMode, profile_of_real_or_fake_step, profile_of_step, refuse_unfit
from memfit.progress import Progress, progress_on_terminal
from memfit.runtime.allocation_meter import out_of_memory_on_cpu
from memfit.runtime.applying.forward_wrapping import plans_set_aside
from memfit.runtime.chunked_loss.language_model_head import head_of
from memfit.runtime.native.native_build import build_engine
from memfit.tuning.batches_by_size import BatchesBySize
from memfit.tuning.fastest_sizes import failed, leave_out_larger, measured, run_fastest
from memfit.tuning.size_search import SizeSearch
from memfit.tuning.tuned import Tuned, TunedSize
from memfit.validation import shown, whole_number
from memfit.verification.verifying import planned_alone

_OUT_OF_MEMORY = "the device ran out of memory"


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
    seconds follow from two sizes that are measured. The three that are predicted to be fastest are run by their plans.
    With a ``global_batch``, only sizes that divide it count, and ``Tuned.accumulation`` steps make up one; steps are
    then measured with gradients that exist before.

    Where nothing fits, or ``make_batch`` raises, there is an error and the model is as it was. A size at which the step
    raises, or runs out of memory, is in the table with what went wrong, and not chosen.
    """
    refuse_unfit(model, "real")
    checked_budget(budget)
    checked_host_budget(host_budget)
    checked_compile(compile)
    if chunk_loss:
        head_of(model)
    if ranks_of(model).are_several:
        raise InvalidParameterError(
            "tune() runs in one process, because each process would choose a size of its own: tune the model before it "
            "is wrapped for the job, and fit() the size in the job"
        )
    if global_batch is not None:
        global_batch = whole_number(global_batch, "global_batch", minimum=1)
    wanted = _sizes_to_try(sizes, global_batch)
    arguments: dict[str, Any] = {"loss": loss, "step": step, "optimizer": optimizer, "gradients": gradients}
    batches = BatchesBySize(make_batch, targets, arguments, global_batch)

    def profiled(size: int, mode: ProfileMode) -> ModelProfile:
        step = TrainingStep(model, batches.at(size))
        if mode == "real":
            return profile_of_real_or_fake_step(step, chunk_loss=chunk_loss)
        return profile_of_step(step, mode, chunk_loss=chunk_loss)

    with progress_on_terminal() if progress is None else nullcontext(progress) as shown_progress:
        build_engine(shown_progress)
        search = SizeSearch(profiled, budget, host_budget, shown_progress)
        rows = search.rows(wanted, stops_at_first_too_large=sizes is None)
        if global_batch is not None:
            rows = {size: replace(row, accumulation=global_batch // size) for size, row in rows.items()}

        def run(row: TunedSize) -> TunedSize:
            return _run(row, TrainingStep(model, batches.at(row.size)), shown_progress)

        run_fastest(rows, run)

        def fit_size(size: int) -> Fitted:
            given = batches.at(size)
            return fit(
                model,
                given.batch,
                budget=budget,
                targets=given.targets,
                host_budget=host_budget,
                compile=compile,
                chunk_loss=chunk_loss,
                progress=shown_progress,
                **{**arguments, "gradients": given.gradients},
            )

        return _fitted_best(rows, fit_size)


def _sizes_to_try(sizes: Iterable[int] | None, global_batch: int | None) -> list[int] | None:
    """Return the sizes to try, ascending; None where they are to be searched."""
    given = None if sizes is None else _checked_sizes(sizes)
    if global_batch is None:
        return given
    dividing = [size for size in given or range(1, global_batch + 1) if global_batch % size == 0]
    if not dividing:
        raise InvalidParameterError(f"none of the sizes divides the global batch of {global_batch}; got {given}")
    return dividing


def _run(row: TunedSize, step: TrainingStep, progress: Progress) -> TunedSize:
    """Run the step by its plan; where it runs out of memory, the size does not count."""
    assert row.plan is not None
    try:
        with plans_set_aside(step.model), out_of_memory_on_cpu():
            tried = planned_alone(step, row.plan, progress)
    except torch.OutOfMemoryError:
        return failed(row, _OUT_OF_MEMORY)
    return measured(row, tried.peak_bytes, tried.step_seconds)


def _fitted_best(rows: dict[int, TunedSize], fit_size: Callable[[int], Fitted]) -> Tuned:
    """Fit the fastest size that was run; where that fails after all, the next."""
    last_error: Exception | None = None
    while True:
        feasible = [row for row in rows.values() if row.plan is not None]
        if not feasible:
            break
        row = max(feasible, key=lambda row: (row.is_measured, row.throughput))
        try:
            fitted = fit_size(row.size)
        except (torch.OutOfMemoryError, InfeasibleBudgetError, VerificationError) as error:
            last_error = error
            is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
            rows[row.size] = failed(row, _OUT_OF_MEMORY if is_out_of_memory else str(error).partition(";")[0])
            if is_out_of_memory or isinstance(error.__cause__, torch.OutOfMemoryError):
                leave_out_larger(rows, row.size)
            continue
        verification = fitted.verification
        # Of two measurements, other work of the machine made the longer one longer.
        seconds = verification.step_seconds
        if row.is_measured and row.seconds is not None:
            seconds = min(seconds, row.seconds)
        chosen = rows[row.size] = measured(replace(row, plan=fitted.plan), verification.peak_bytes, seconds)
        table = tuple(rows[size] for size in sorted(rows))
        return Tuned(row.size, chosen.throughput, fitted, table, row.accumulation)
    if isinstance(last_error, MemfitError):
        raise last_error
    raise MemfitError("the step ran out of memory at every size that was tried; give a smaller budget") from last_error


def _checked_sizes(sizes: object) -> list[int]:
    try:
        given = list(sizes)  # type: ignore[call-overload]
    except TypeError:
        given = []
    if not given:
        raise InvalidParameterError(f"sizes must be a list of batch sizes, such as [4, 8, 16]; got {shown(sizes)}")
    return sorted({whole_number(size, "sizes", minimum=1) for size in given})
