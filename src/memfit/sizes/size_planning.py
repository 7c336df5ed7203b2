"""Plans for a bounded number of sizes: closer together where the plans' times differ more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from memfit.errors import InfeasibleBudgetError, MemfitError
from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import Plan
from memfit.graph.size_plans import SizedPlan, SizePlans
from memfit.units import format_bytes

# A step between two planned sizes runs by the plan of the larger: it may be this share of a step slower than its own.
_LARGEST_LOSS = 0.01
_MOST_PLANS = 24
# Below the smallest batch, sizes are halved this often in search of one that needs no recomputation.
_MOST_HALVINGS = 6

PlanForBytes = Callable[[ModelProfile, int], Plan]


class SizePlanner:
    """Plans for the sizes of one step within ``budget_bytes``, leaving room for ``margin_bytes``.

    ``profile_at`` gives the profile of a step of any size, ``plan_for`` plans for a profile and a number of bytes.
    """

    def __init__(
        self,
        profile_at: Callable[[int], ModelProfile],
        plan_for: PlanForBytes,
        budget_bytes: int,
        *,
        margin_bytes: int = 0,
        multiple: int = 1,
    ) -> None:
        self._profile_at = profile_at
        self._plan_for = plan_for
        self._budget_bytes = budget_bytes
        self._margin_bytes = margin_bytes
        self._multiple = multiple

    def plan_at(self, size: int) -> SizedPlan:
        """Return the plan for a step of that size."""
        profile = self._profile_at(size)
        plan = self._plan_for(profile, max(0, self._budget_bytes - self._margin_bytes))
        seconds = profile.step_seconds * (1 + plan.predicted_overhead)
        return SizedPlan(size, replace(plan, budget_bytes=self._budget_bytes), seconds)

    def plans(self, smallest: int, largest: SizedPlan) -> SizePlans:
        """Return plans for sizes from ``smallest``, or from below it, to ``largest``."""
        planned = {largest.size: largest}
        size = smallest
        for _ in range(_MOST_HALVINGS):
            planned[size] = self.plan_at(size)
            if not planned[size].plan.changes_anything or size == 1:
                break
            size //= 2
        unsplittable: set[tuple[int, int]] = set()
        while len(planned) < _MOST_PLANS:
            gaps = [gap for gap in _gaps(planned) if gap not in unsplittable]
            if not gaps:
                break
            gap = max(gaps, key=lambda gap: _loss(planned, gap))
            middle = self._middle(*gap)
            try:
                planned[middle] = self.plan_at(middle)
            except InfeasibleBudgetError:
                raise
            except MemfitError:
                # A size that the model does not take.
                unsplittable.add(gap)
        return SizePlans(tuple(planned.values()))

    def largest_feasible(self, below: int) -> int | None:
        """Return the largest size below ``below`` that a plan can keep within the budget, None where there is none."""
        feasible, infeasible = 0, below
        while infeasible - feasible > max(1, below // 64):
            middle = (feasible + infeasible) // 2
            try:
                self.plan_at(middle)
            except MemfitError:
                infeasible = middle
            else:
                feasible = middle
        return feasible or None

    def too_large(self, size: int, error: InfeasibleBudgetError) -> InfeasibleBudgetError:
        """Return the error for a size that cannot be planned for, with the largest size that can."""
        fits = self.largest_feasible(size)
        advice = "no smaller size does either" if fits is None else f"the largest size that fits is about {fits}"
        return InfeasibleBudgetError(
            f"a batch of size {size} cannot be kept within {format_bytes(self._budget_bytes)}, {advice}: {error}",
            minimum_bytes=error.minimum_bytes,
        )

    def _middle(self, low: int, high: int) -> int:
        """Return a size between two, a multiple of what all given sizes are multiples of where there is one."""
        middle = (low + high) // 2
        rounded = middle // self._multiple * self._multiple
        return next(each for each in (rounded, rounded + self._multiple, middle) if low < each < high)


def _gaps(planned: dict[int, SizedPlan]) -> list[tuple[int, int]]:
    sizes = sorted(planned)
    return [gap for gap in pairwise(sizes) if gap[1] - gap[0] > 1 and _loss(planned, gap) > _LARGEST_LOSS]


def _loss(planned: dict[int, SizedPlan], gap: tuple[int, int]) -> float:
    low, high = (planned[size].plan.predicted_overhead for size in gap)
    return high - low
