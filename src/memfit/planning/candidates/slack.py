"""Use slack: save what there is room for, in plans that leave memory unused.

What is live at each point of a simulated step gives how much room there is. What a plan drops is saved where it fits,
the most expensive for its size first: replays by the seconds of their op, copies by those of the link.
One simulation gives this for everything that the plan drops, so that hardly anything has to be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from memfit.planning.candidates.pool import Candidate, Pool
from memfit.planning.simulate.walk import Restoration, Walk
from memfit.planning.step import Step
from memfit.planning.step.offload_rules import NOTHING_OFFLOADED, Offloading

# Judges a plan that recomputes these values, as far as the engine would, and offloads others.
Judge = Callable[[frozenset[int], Offloading], Candidate]

# How many budgets a step of one op could pay for, and how many there are at most.
_EFFORT_OPS, _MOST_BUDGETS = 90_000, 256


def use_slack(pool: Pool) -> Iterator[frozenset[int]]:
    """Yield plans of the frontier with more saved.

    Leaving this out costs 0.08 points of overhead on average, and up to 0.4 (`benchmarks/ablation.py`).
    """
    plans = slack_used_at_budgets(pool.step, lambda recomputed, _: pool.add(recomputed), pool.frontier())
    yield from (plan.recomputed for plan in plans)


def slack_used_at_budgets(step: Step, judge: Judge, frontier: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the plans of a frontier, fastest first, that fit each of many budgets, with what there is room for saved.

    The budgets begin at the smallest peak, and are closer to each other there: that is where a byte costs the most.
    """
    num_budgets = min(_EFFORT_OPS // max(step.num_ops, 1), _MOST_BUDGETS)
    high, low = frontier[0].peak_bytes, frontier[-1].peak_bytes
    for budget_bytes in sorted({low + int((high - low) * (k / num_budgets) ** 1.5) for k in range(num_budgets)}):
        fastest = next(plan for plan in frontier if plan.peak_bytes <= budget_bytes)
        yield slack_used(step, judge, fastest, budget_bytes)


def slack_used(step: Step, judge: Judge, plan: Candidate, budget_bytes: int) -> Candidate:
    """Return ``plan``, or a faster one that saves more of what it drops and stays within the budget."""
    fitting = _that_fit(step, plan, budget_bytes)
    # Replays that start from what is saved now may hold it for longer than the plan's own did. So all of it is tried,
    # half of it, and so on.
    while fitting:
        saved = frozenset(value for restored in fitting for value in restored.values)
        sent = plan.offloading.values - saved
        offloading = plan.offloading._replace(values=sent) if sent else NOTHING_OFFLOADED
        tried = judge(plan.recomputed - saved, offloading)
        if tried.peak_bytes <= budget_bytes and tried.added_seconds < plan.added_seconds:
            return tried
        fitting = fitting[: len(fitting) // 2]
    return plan


def _that_fit(step: Step, plan: Candidate, budget_bytes: int) -> list[Restoration]:
    """Return what there is room for, to all appearances, the most expensive for its size first."""
    walk, link = Walk(step, plan.recomputed, plan.offloading), step.profile.link
    room_bytes = budget_bytes - walk.memory_bytes
    of_link = 0.0 if link is None else 1 / link.out_bytes_per_second + 1 / link.back_bytes_per_second

    def seconds_per_byte(restored: Restoration) -> float:
        if restored.op is None:
            return of_link
        return step.replay_seconds[restored.op] / max(sum(absence.num_bytes for absence in restored.absences), 1)

    fitting = []
    for restored in sorted(walk.restorations(), key=lambda restored: (-seconds_per_byte(restored), restored.values)):
        if all(room_bytes[begin:end].min() >= num_bytes for begin, end, num_bytes in restored.absences):
            fitting.append(restored)
            for begin, end, num_bytes in restored.absences:
                room_bytes[begin:end] -= num_bytes
    return fitting
