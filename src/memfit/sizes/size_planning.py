"""Plans for a bounded number of sizes: closer together where the plans' times differ more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import NamedTuple

from memfit.errors import InfeasibleBudgetError, MemfitError
from memfit.graph.plan import Plan
from memfit.graph.size_plans import SizedPlan, SizePlans
from memfit.sizes.batch_form import Sizes

# A step between two planned sizes runs by the plan of the larger: it may be this share of a step slower than its own.
_LARGEST_LOSS = 0.01
_MOST_PLANS = 32
# Where several sizes vary on their own, planned sizes are at least this share of the largest apart.
_LEAST_EXTENT = 1 / 16


class _Cell(NamedTuple):
    """Steps that are larger than ``low`` in every size, and at most ``high``. They run by the plan for ``high``."""

    low: Sizes
    high: Sizes


def plans_for_sizes(
    plan_at: Callable[[Sizes], SizedPlan],
    overhead_at: Callable[[Plan, Sizes], float],
    least: Sizes,
    largest: SizedPlan,
    multiples: Sizes,
) -> SizePlans:
    """Return plans for all sizes up to those of ``largest``, made by ``plan_at``; one is for the ``least``.

    ``overhead_at`` returns the overhead of a plan for a step of other sizes than those that it was made for. Where
    there are such sizes, planned sizes are multiples of ``multiples``. Sizes that ``plan_at`` refuses, because the
    model does not take them, run by the next larger plan.
    """
    planned = {largest.sizes: largest}
    with suppress(MemfitError):
        planned.setdefault(least, plan_at(least))
    costs: dict[tuple[Sizes, Sizes], float] = {}

    def cost(cell: _Cell) -> float:
        """Return the largest overhead in the cell: small steps may replay at a larger share."""
        corner = tuple(map(max, cell.low, least))
        if (cell.high, corner) not in costs:
            plan = planned[cell.high].plan
            costs[cell.high, corner] = max(plan.predicted_overhead, overhead_at(plan, corner))
        return costs[cell.high, corner]

    cells = [_Cell(tuple(0 for _ in largest.sizes), largest.sizes)]
    while cells and len(planned) < _MOST_PLANS:
        losses = {cell: cost(cell) - _least_overhead(planned, cell) for cell in cells}
        cells = [cell for cell in cells if losses[cell] > _LARGEST_LOSS]
        if not cells:
            break
        cell = max(cells, key=lambda cell: losses[cell] * prod(_extents(cell, largest)))
        cells.remove(cell)
        extents = _extents(cell, largest)
        for axis in sorted(range(len(extents)), key=lambda axis: -extents[axis]):
            is_too_small = len(extents) > 1 and extents[axis] < 2 * _LEAST_EXTENT
            middle = None if is_too_small else _middle(cell.low[axis], cell.high[axis], multiples[axis])
            if middle is None:
                continue
            high = (*cell.high[:axis], middle, *cell.high[axis + 1 :])
            try:
                planned.setdefault(high, plan_at(high))
            except InfeasibleBudgetError:
                raise
            except MemfitError:
                # A size that the model does not take.
                continue
            low = (*cell.low[:axis], middle, *cell.low[axis + 1 :])
            cells += [_Cell(cell.low, high), _Cell(low, cell.high)]
            break
    return SizePlans(list(planned.values()), largest)


def _least_overhead(planned: dict[Sizes, SizedPlan], cell: _Cell) -> float:
    """Return what a step in ``cell`` takes at least by a plan of its own: not less than a smaller one by its own."""
    below = [
        entry.plan.predicted_overhead
        for sizes, entry in planned.items()
        if all(size <= low for size, low in zip(sizes, cell.low, strict=True))
    ]
    return max([0.0, *below])


def _extents(cell: _Cell, largest: SizedPlan) -> list[float]:
    return [(high - low) / most for low, high, most in zip(cell.low, cell.high, largest.sizes, strict=True)]


def _middle(low: int, high: int, multiple: int) -> int | None:
    """Return a size between two, a multiple of ``multiple`` where there is one; None where there is no size."""
    middle = (low + high) // 2
    rounded = middle // multiple * multiple
    return next((each for each in (rounded, rounded + multiple, middle) if low < each < high), None)
