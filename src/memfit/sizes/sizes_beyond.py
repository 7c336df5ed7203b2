"""Plans for batches that are larger than all that were planned for, when a forward pass comes with one."""

from __future__ import annotations

import math
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
# The largest size that fits is looked for until it is known to this factor.
_CLOSE_GROWTH = 1.05
_MOST_HALVINGS = 8


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
        made: dict[Shapes, SizedPlan] = {}
        for shapes in dict.fromkeys(wanted):
            if made and shapes == needed:
                break
            try:
                made[shapes] = _in_another_thread(partial(self._plan_of, shapes))
            except MemfitError as error:
                failed = error
            else:
                self._plans.add(made[shapes])
                # Where that for the largest other sizes recomputes, these sizes may not need it.
                if not made[shapes].plan.changes_anything:
                    break
        if made:
            shapes, entry = made.popitem()
            _warn_of(self._form.in_words(needed), self._form.in_words(shapes), self._plans.largest, entry)
            return None
        # What is wrong with the size itself, with nothing to spare.
        if isinstance(failed, InfeasibleBudgetError):
            raise self._refusal(needed, failed) from None
        return str(failed)

    def _refusal(self, needed: Shapes, error: InfeasibleBudgetError) -> InfeasibleBudgetError:
        """Return the error for a size that cannot be planned for, with the largest size that can."""
        budget_bytes = self._plans.largest.plan.budget_bytes or 0
        return InfeasibleBudgetError(
            f"a batch of size {self._form.in_words(needed)} cannot be kept within {format_bytes(budget_bytes)}, the "
            f"largest size that fits is about {self._form.in_words(self._largest_feasible(needed))}: {error}",
            minimum_bytes=error.minimum_bytes,
        )

    def _largest_feasible(self, needed: Shapes) -> Shapes:
        """Return the largest shapes with a plan that are found between those of the largest batch and ``needed``."""
        most = self._form.shapes[-1]
        feasible = tuple(tuple(map(min, shape, largest)) for shape, largest in zip(needed, most, strict=True))
        infeasible = needed
        for _ in range(_MOST_HALVINGS):
            middle = _halfway(feasible, infeasible)
            if _growth(feasible, infeasible) <= _CLOSE_GROWTH or middle in (feasible, infeasible):
                break
            try:
                _in_another_thread(partial(self._plan_of, middle))
            except MemfitError:
                infeasible = middle
            else:
                feasible = middle
        return feasible


def _halfway(one: Shapes, other: Shapes) -> Shapes:
    """Return shapes as many times as large as ``one`` as ``other`` is as large as they."""
    return tuple(
        tuple(math.isqrt(small * large) for small, large in zip(smaller, larger, strict=True))
        for smaller, larger in zip(one, other, strict=True)
    )


def _growth(one: Shapes, other: Shapes) -> float:
    pairs = (pair for shapes in zip(one, other, strict=True) for pair in zip(*shapes, strict=True))
    return max(large / max(1, small) for small, large in pairs)


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
