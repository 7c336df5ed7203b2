"""Plans for batches that are larger than all that were planned for, when a forward pass comes with one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from memfit.errors import InfeasibleBudgetError, MemfitError
from memfit.graph.inputs import Input
from memfit.graph.size_plans import SizedPlan, SizePlans
from memfit.sizes.batch_form import BatchForm, Shapes
from memfit.units import format_bytes

# Sizes beyond the largest are planned for with so much to spare, so that the next one is not planned for again.
_SPARE_SHARE = 1 / 8
# The largest size that fits is found to this share of what is beyond the largest.
_MOST_HALVINGS = 4


class SizesBeyond:
    """Adds plans for larger batches to ``plans``. ``plan_of`` plans for a batch of given shapes."""

    def __init__(self, form: BatchForm, plan_of: Callable[[Shapes], SizedPlan], plans: SizePlans) -> None:
        self._form = form
        self._plan_of = plan_of
        self._plans = plans
        self._planned = plans.largest.plan.inputs

    def plan_for(self, inputs: tuple[Input, ...]) -> str | None:
        """Add a plan for a batch that is large enough for ``inputs``, or raise where the budget has none.

        Where the step cannot be planned for, return why.
        """
        needed = self._form.shapes_for(inputs, self._planned)
        if self._form.is_within_largest(needed):
            return "what grew does not grow with the batch"
        wanted = (
            self._form.shapes_for(inputs, self._planned, spare=_SPARE_SHARE, fills=True),
            self._form.shapes_for(inputs, self._planned, spare=_SPARE_SHARE),
            needed,
        )
        failed: MemfitError | None = None
        for shapes in dict.fromkeys(wanted):
            try:
                entry = _in_another_thread(partial(self._plan_of, shapes))
            except MemfitError as error:
                failed = error
            else:
                self._plans.add(entry)
                _warn_of(self._form.in_words(needed), self._form.in_words(shapes), self._plans.largest, entry)
                return None
        # What is wrong with the size itself, with nothing to spare.
        if isinstance(failed, InfeasibleBudgetError):
            raise self._refusal(needed, failed) from None
        return str(failed)

    def _refusal(self, needed: Shapes, error: InfeasibleBudgetError) -> InfeasibleBudgetError:
        """Return the error for a size that cannot be planned for, with the largest size that can."""
        feasible, infeasible = 0.0, 1.0
        fits = self._at_share(needed, 0.0)
        for _ in range(_MOST_HALVINGS):
            share = (feasible + infeasible) / 2
            shapes = self._at_share(needed, share)
            try:
                _in_another_thread(partial(self._plan_of, shapes))
            except MemfitError:
                infeasible = share
            else:
                feasible, fits = share, shapes
        budget_bytes = self._plans.largest.plan.budget_bytes or 0
        return InfeasibleBudgetError(
            f"a batch of size {self._form.in_words(needed)} cannot be kept within {format_bytes(budget_bytes)}, the "
            f"largest size that fits is about {self._form.in_words(fits)}: {error}",
            minimum_bytes=error.minimum_bytes,
        )

    def _at_share(self, needed: Shapes, share: float) -> Shapes:
        """Return shapes on the way from those of the largest batch to the needed ones, where these are larger."""
        return tuple(
            tuple(
                length if length <= most else round(most + share * (length - most))
                for length, most in zip(shape, largest, strict=True)
            )
            for shape, largest in zip(needed, self._form.shapes[-1], strict=True)
        )


def _warn_of(size: str, planned_size: str, largest: SizedPlan, entry: SizedPlan) -> None:
    warnings.warn(
        f"a batch of size {size} is larger than the largest that was planned for ({largest.size_in_words}); a plan for "
        f"sizes up to {planned_size} was made: {format_bytes(entry.plan.predicted_peak_bytes)} predicted",
        stacklevel=7,
    )


def _in_another_thread(make: Callable[[], SizedPlan]) -> SizedPlan:
    """Call ``make`` where neither autocast nor a mode of this thread's forward pass is active."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(make).result()
