"""``fit(batches=...)``: fits the largest batch, then plans for the sizes below it."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress

from torch import nn

from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.errors import InfeasibleBudgetError, MemfitError, VerificationError
from memfit.fitted import Fitted, FittedBySize
from memfit.graph.inputs import Input
from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import Plan
from memfit.graph.size_plans import SizedPlan, SizePlans
from memfit.planning.budgets import HostBudgetLike
from memfit.planning.planner import plan as plan_step
from memfit.profiling import ProfileMode, profile_of_step
from memfit.progress import Progress
from memfit.sizes.batch_form import BatchForm
from memfit.sizes.scaled_profiles import ScaledProfiles
from memfit.sizes.size_planning import SizePlanner
from memfit.units import format_bytes
from memfit.verification.verifying import verify_step

# Each round leaves room for how far peaks were above what was predicted in the last one.
_MOST_ROUNDS = 3
# A size beyond the largest is planned for with so much to spare, so that the next one is not planned for again.
_SPARE_SHARE = 1 / 8

FitOne = Callable[[StepArguments], Fitted]


def fit_by_size(
    model: nn.Module,
    arguments: StepArguments,
    batches: object,
    host_budget: HostBudgetLike,
    fit_one: FitOne,
    progress: Progress,
) -> FittedBySize:
    """Return plans for every size up to that of the largest of ``batches``; ``fit_one`` fits a single one."""
    form = BatchForm(arguments, batches)
    largest = fit_one(form.arguments[-1])
    largest.remove()
    return _FittingBySize(model, form, largest, host_budget, progress).fitted()


class _FittingBySize:
    def __init__(
        self, model: nn.Module, form: BatchForm, largest: Fitted, host_budget: HostBudgetLike, progress: Progress
    ) -> None:
        self._model = model
        self._form = form
        self._largest = largest
        self._host_budget = host_budget
        self._progress = progress
        assert largest.plan.budget_bytes is not None
        self._budget_bytes = largest.plan.budget_bytes
        self._chunk_loss = largest.plan.chunks_loss
        self._margin_bytes = max(0, largest.verification.peak_bytes - largest.plan.predicted_peak_bytes)

    def fitted(self) -> FittedBySize:
        """Plan for the sizes, try the plans on the other batches, and apply them."""
        measured = self._measured()
        profiles = ScaledProfiles(
            measured, lambda size: self._profile(size, "fake"), lambda size: self._profile(size, "real")
        )
        for _ in range(_MOST_ROUNDS):
            self._progress.stage("planning for sizes")
            planner = self._planner(profiles)
            plans = self._plans(planner, form_sizes=self._form.sizes)
            missed_bytes = self._missed_bytes(plans, measured)
            if missed_bytes == 0:
                break
            self._margin_bytes += missed_bytes
        else:
            raise VerificationError(
                f"peaks of the smaller batches are above the budget of {format_bytes(self._budget_bytes)} after "
                f"{_MOST_ROUNDS} rounds of planning; the model runs as before. Give a larger budget"
            )
        beyond = _SizesBeyond(planner, plans, self._form.multiple)
        return FittedBySize(self._model, plans, self._largest.profile, self._largest.verification, beyond.plan_for)

    def _measured(self) -> dict[int, ModelProfile]:
        """Return the profiles of the given batches."""
        self._progress.stage("profiling the other sizes")
        measured = {self._form.sizes[-1]: self._largest.profile}
        for size in self._form.sizes[:-1]:
            if size not in measured:
                measured[size] = self._profile(size, "real")
        is_real = {size: profile.measured_with == "real step" for size, profile in measured.items()}
        if any(is_real.values()):
            # Estimated seconds are no measure beside real ones: what did not fit the device is scaled from the rest.
            return {size: profile for size, profile in measured.items() if is_real[size]}
        return measured

    def _profile(self, size: int, mode: ProfileMode) -> ModelProfile:
        if mode == "real" and size > self._form.sizes[-1]:
            raise MemfitError(f"there is no batch of size {size} to run; the largest is of size {self._form.sizes[-1]}")
        step = TrainingStep(self._model, self._form.at(size))
        return profile_of_step(step, mode, chunk_loss=self._chunk_loss)

    def _planner(self, profiles: ScaledProfiles) -> SizePlanner:
        def plan_for(profile: ModelProfile, num_bytes: int) -> Plan:
            return plan_step(profile, budget=num_bytes, host_budget=self._host_budget)

        return SizePlanner(
            profiles.at,
            plan_for,
            self._budget_bytes,
            margin_bytes=self._margin_bytes,
            multiple=self._form.multiple,
        )

    def _plans(self, planner: SizePlanner, form_sizes: tuple[int, ...]) -> SizePlans:
        plan, profile = self._largest.plan, self._largest.profile
        seconds = profile.step_seconds * (1 + plan.predicted_overhead)
        return planner.plans(form_sizes[0], SizedPlan(form_sizes[-1], plan, seconds))

    def _missed_bytes(self, plans: SizePlans, measured: dict[int, ModelProfile]) -> int:
        """Return by how much the peak of any of the other batches is above the budget, by the plan that it runs by."""
        missed_bytes = 0
        for size in self._form.sizes[:-1]:
            profile = measured.get(size)
            place = None if profile is None else plans.place_for(profile.inputs)
            if place is None:
                continue
            step = TrainingStep(self._model, self._form.at(size))
            verification = verify_step(step, plans.entries[place].plan, self._progress)
            if not verification.gradients_hold:
                names = ", ".join(verification.differing_parameters[:3])
                raise VerificationError(
                    f"the plan for size {size} changed the gradients of {names} (largest relative error "
                    f"{verification.max_gradient_error:.2g}), so no plan was applied; the model runs as before"
                )
            missed_bytes = max(missed_bytes, verification.peak_bytes - self._budget_bytes)
        return missed_bytes


class _SizesBeyond:
    """Plans for sizes beyond the largest when a forward pass comes with one."""

    def __init__(self, planner: SizePlanner, plans: SizePlans, multiple: int) -> None:
        self._planner = planner
        self._plans = plans
        self._multiple = multiple

    def plan_for(self, inputs: tuple[Input, ...]) -> None:
        """Add a plan for a size that is large enough for ``inputs``, or raise where there is none."""
        size = self._size_of(inputs)
        if size is None:
            return
        spare = math.ceil(size * (1 + _SPARE_SHARE) / self._multiple) * self._multiple
        entry: SizedPlan | None = None
        with suppress(MemfitError):
            entry = _in_another_thread(lambda: self._planner.plan_at(spare))
        if entry is None:
            try:
                entry = _in_another_thread(lambda: self._planner.plan_at(size))
            except InfeasibleBudgetError as error:
                raise self._planner.too_large(size, error) from None
            except MemfitError:
                # The model does not take this size, and says so itself, or cannot be described at it.
                return
        warnings.warn(
            f"a batch of size {size} is larger than the largest that was planned for ({self._plans.largest.size}); a "
            f"plan for sizes up to {entry.size} was made: {format_bytes(entry.plan.predicted_peak_bytes)} predicted",
            stacklevel=6,
        )
        self._plans.add(entry)

    def _size_of(self, inputs: tuple[Input, ...]) -> int | None:
        """Return the size of a step on ``inputs``: sizes of inputs go along with it. None where they do not."""
        first, last = self._plans.entries[0], self._plans.entries[-1]
        small = {entry.name: entry.shape for entry in first.plan.inputs}
        large = {entry.name: entry.shape for entry in last.plan.inputs}
        needed = last.size
        for entry in inputs:
            for dim, length in enumerate(entry.shape):
                least, most = small[entry.name][dim], large[entry.name][dim]
                if length <= most:
                    continue
                if most == least:
                    return None
                needed = max(needed, math.ceil(last.size + (length - most) * (last.size - first.size) / (most - least)))
        return needed


def _in_another_thread(make: Callable[[], SizedPlan]) -> SizedPlan:
    """Call ``make`` where neither autocast nor a mode of this thread's forward pass is active."""
    made: list[SizedPlan] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]
