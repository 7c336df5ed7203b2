"""``fit(batches=...)``: fits the largest batch, then plans for the sizes below it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from memfit.budgets import HostBudgetLike
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.distributed.ranks import Ranks, ranks_of
from memfit.errors import InvalidParameterError, MemfitError, VerificationError
from memfit.fitted import Fitted, FittedBySize
from memfit.graph.model_profile import ModelProfile, Phase
from memfit.graph.plan import Decision, Plan
from memfit.graph.size_plans import SizedPlan, SizePlans
from memfit.planning.known_steps import known_step
from memfit.planning.planner import plan as plan_step
from memfit.profiling import ProfileMode, profile_of_step
from memfit.progress import Progress
from memfit.sizes.batch_form import BatchForm, Shapes, Sizes
from memfit.sizes.scaled_profiles import ScaledProfiles
from memfit.sizes.size_planning import plans_for_sizes
from memfit.sizes.sizes_beyond import SizesBeyond
from memfit.units import format_bytes
from memfit.verification.verifying import verify_step

# Each round leaves room for how far peaks were above what was predicted in the last one.
_MOST_ROUNDS = 3

FitOne = Callable[[StepArguments], Fitted]


def fit_by_size(
    model: nn.Module, form: BatchForm, host_budget: HostBudgetLike, fit_one: FitOne, progress: Progress
) -> FittedBySize:
    """Return plans for every size up to that of the largest batch of ``form``; ``fit_one`` fits a single one."""
    _refuse_other_sizes(ranks_of(model), form)
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
        self._profiles = ScaledProfiles(
            self._measured(), lambda shapes: self._profile(shapes, "fake"), lambda shapes: self._profile(shapes, "real")
        )

    def fitted(self) -> FittedBySize:
        """Plan for the sizes, try the plans on the other batches, and apply them."""
        self._refuse_other_structures()
        if len(self._form.most_sizes) > 1 and not self._takes_sizes_on_their_own():
            self._form.tie_axes()
        for _ in range(_MOST_ROUNDS):
            self._progress.stage("planning for sizes")
            plans = self._plans()
            missed_bytes = self._missed_bytes(plans)
            if missed_bytes == 0:
                break
            self._margin_bytes += missed_bytes
        else:
            raise VerificationError(
                f"peaks of the smaller batches are above the budget of {format_bytes(self._budget_bytes)} after "
                f"{_MOST_ROUNDS} rounds of planning; the model runs as before. Give a larger budget"
            )
        beyond = SizesBeyond(self._form, self.plan_of, plans)
        return FittedBySize(self._model, plans, self._largest.profile, self._largest.verification, beyond.plan_for)

    def plan_of(self, shapes: Shapes) -> SizedPlan:
        """Return the plan for a step on a batch of these shapes."""
        profile = self._profiles.at(shapes)
        difference = self._profiles.difference(shapes, self._form.shapes[-1])
        if difference is not None:
            raise MemfitError(f"the step runs other ops than for the batches that were measured: {difference}")
        plan = plan_step(profile, budget=max(0, self._budget_bytes - self._margin_bytes), host_budget=self._host_budget)
        seconds = profile.step_seconds * (1 + plan.predicted_overhead)
        return SizedPlan(self._form.sizes_of(shapes), replace(plan, budget_bytes=self._budget_bytes), seconds)

    def _overhead_at(self, plan: Plan, sizes: Sizes) -> float:
        """Return the overhead of ``plan`` for a step of these sizes; none where the model does not take them."""
        try:
            profile = self._profiles.at(self._form.shapes_at(sizes))
        except MemfitError:
            return 0.0
        known = known_step(profile)
        decisions = [plan.decisions.get(value.name, Decision.SAVE) for value in profile.values]
        if Decision.OFFLOAD in decisions or not profile.step_seconds:
            return plan.predicted_overhead
        recomputed = {index for index, decision in enumerate(decisions) if decision is Decision.RECOMPUTE}
        simulation = known.simulation(frozenset(known.step.recomputed_of(recomputed)))
        return simulation.added_seconds / profile.step_seconds

    def _measured(self) -> dict[Shapes, ModelProfile]:
        """Return the profiles of the given batches."""
        self._progress.stage("profiling the other sizes")
        measured = {self._form.shapes[-1]: self._largest.profile}
        for shapes in self._form.shapes[:-1]:
            if shapes not in measured:
                measured[shapes] = self._profile(shapes, "real")
        return measured

    def _profile(self, shapes: Shapes, mode: ProfileMode) -> ModelProfile:
        try:
            step = TrainingStep(self._model, self._form.at(shapes))
            return profile_of_step(step, mode, chunk_loss=self._chunk_loss)
        except MemfitError:
            raise
        except Exception as error:
            if shapes in self._form.shapes:
                raise
            # The model does not take a batch of this size, or not one that is made of the largest.
            raise MemfitError(f"{type(error).__name__}: {error}") from error

    def _refuse_other_structures(self) -> None:
        for shapes in self._form.shapes[:-1]:
            difference = self._profiles.difference(shapes, self._form.shapes[-1])
            if difference is not None:
                raise InvalidParameterError(
                    f"the step runs other ops for a batch of size {self._form.in_words(shapes)} than for one of size "
                    f"{self._form.in_words(self._form.shapes[-1])} ({difference}), so that a plan for one does not "
                    "hold for the other; the model runs as before. Give batches on one side of where that changes, or "
                    "the largest alone as batch"
                )

    def _takes_sizes_on_their_own(self) -> bool:
        """Return whether the model takes batches that are the smallest along one axis and the largest along others."""
        most = self._form.most_sizes
        for axis, least in enumerate(self._form.least_sizes):
            shapes = self._form.shapes_at((*most[:axis], least, *most[axis + 1 :]))
            try:
                self.plan_of(shapes)
            except MemfitError:
                return False
        return True

    def _plans(self) -> SizePlans:
        plan, profile = self._largest.plan, self._largest.profile
        seconds = profile.step_seconds * (1 + plan.predicted_overhead)
        largest = SizedPlan(self._form.most_sizes, plan, seconds)
        if _passes_overlap(profile):
            warnings.warn(
                "the step runs several forward passes before their backward pass, whose sizes are not known when the "
                "first one begins: all run by the plan for the largest batch",
                stacklevel=5,
            )
            return SizePlans([largest], largest)
        refused: list[MemfitError] = []

        def plan_at(sizes: Sizes) -> SizedPlan:
            try:
                return self.plan_of(self._form.shapes_at(sizes))
            except MemfitError as error:
                refused.append(error)
                raise

        plans = plans_for_sizes(plan_at, self._overhead_at, self._form.least_sizes, largest, self._form.multiples)
        if refused and len(plans.entries) == 1:
            warnings.warn(
                f"no smaller size than the largest can be planned for, so that all batches run by its plan: "
                f"{refused[0]}",
                stacklevel=5,
            )
        return plans

    def _missed_bytes(self, plans: SizePlans) -> int:
        """Return by how much the peak of any of the other batches is above the budget, by the plan that it runs by."""
        missed_bytes = 0
        for arguments, shapes in zip(self._form.arguments[:-1], self._form.shapes[:-1], strict=True):
            profile = self._profiles.at(shapes)
            places = plans.places_for(profile.inputs)
            plan = plans.entries[places[0]].plan if places else plans.largest.plan
            step = TrainingStep(self._model, arguments)
            verification = verify_step(step, plan, self._progress)
            if not verification.gradients_hold:
                names = ", ".join(verification.differing_parameters[:3])
                raise VerificationError(
                    f"the plan for size {self._form.in_words(shapes)} changed the gradients of {names} (largest "
                    f"relative error {verification.max_gradient_error:.2g}), so no plan was applied; the model runs "
                    "as before"
                )
            missed_bytes = max(missed_bytes, *step.ranks.gathered(verification.peak_bytes - self._budget_bytes))
        return missed_bytes


def _refuse_other_sizes(ranks: Ranks, form: BatchForm) -> None:
    """Raise in all processes where they have other sizes, which would measure other numbers of steps."""
    if len({*ranks.gathered(form.shapes)}) > 1:
        raise InvalidParameterError(
            "all processes of the job must give batches= of the same sizes, because they measure them together; the "
            "batches that they train on may differ"
        )


def _passes_overlap(profile: ModelProfile) -> bool:
    """Return whether a forward pass of the model begins while another waits for its backward pass."""
    passes = Counter(call.num_backward for call in profile.module_calls if not call.path)
    has_backward = any(op.phase is Phase.BACKWARD for op in profile.ops)
    return has_backward and any(number > 1 for number in passes.values())
