"""Use slack: save what there is room for, in plans that leave memory unused.

What is live at each point of a simulated step gives how much room there is. What a plan drops is saved where it fits,
the most expensive to replay for its size first. One simulation gives this for everything that the plan drops, so that
hardly anything has to be tried.
"""

from __future__ import annotations

from collections.abc import Iterator

from memfit.planning.candidates.pool import Candidate, Pool
from memfit.planning.simulate.walk import Restoration, Walk
from memfit.planning.step import Step

# How many budgets a step of one op could pay for, and how many there are at most.
_EFFORT_OPS, _MOST_BUDGETS = 90_000, 256


def use_slack(pool: Pool) -> Iterator[frozenset[int]]:
    """Yield the plans of the frontier that fit each of many budgets, with what there is room for saved.

    The budgets begin at the smallest peak, and are closer to each other there: that is where a byte costs the most.
    Leaving this out costs 0.1 points of overhead on average, and up to 0.4 (`benchmarks/ablation.py`).
    """
    frontier = pool.frontier()
    num_budgets = min(_EFFORT_OPS // max(pool.step.num_ops, 1), _MOST_BUDGETS)
    high, low = frontier[0].peak_bytes, frontier[-1].peak_bytes
    for budget_bytes in sorted({low + int((high - low) * (k / num_budgets) ** 1.5) for k in range(num_budgets)}):
        fastest = next(plan for plan in frontier if plan.peak_bytes <= budget_bytes)
        yield slack_used(pool, fastest, budget_bytes).recomputed


def slack_used(pool: Pool, plan: Candidate, budget_bytes: int) -> Candidate:
    """Return ``plan``, or a faster one that saves more of what it drops and stays within the budget."""
    fitting = _that_fit(pool.step, plan, budget_bytes)
    # Replays that start from what is saved now may hold it for longer than the plan's own did. So all of it is tried,
    # half of it, and so on.
    while fitting:
        tried = pool.add(plan.recomputed.difference(*(restored.values for restored in fitting)))
        if tried.peak_bytes <= budget_bytes and tried.added_seconds < plan.added_seconds:
            return tried
        fitting = fitting[: len(fitting) // 2]
    return plan


def _that_fit(step: Step, plan: Candidate, budget_bytes: int) -> list[Restoration]:
    """Return what there is room for, to all appearances, the most expensive for its size first."""
    walk = Walk(step, plan.recomputed)
    room_bytes = budget_bytes - walk.memory_bytes

    def seconds_per_byte(restored: Restoration) -> float:
        return step.replay_seconds[restored.op] / max(sum(absence.num_bytes for absence in restored.absences), 1)

    fitting = []
    for restored in sorted(walk.restorations(), key=lambda restored: (-seconds_per_byte(restored), restored.values)):
        if all(room_bytes[begin:end].min() >= num_bytes for begin, end, num_bytes in restored.absences):
            fitting.append(restored)
            for begin, end, num_bytes in restored.absences:
                room_bytes[begin:end] -= num_bytes
    return fitting
