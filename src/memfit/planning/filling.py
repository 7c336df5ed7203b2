"""Plans that use the memory which others leave unused.

Where two plans that follow each other on the frontier are far apart, a budget between them would get the smaller one.
What only that one recomputes is then saved in part: the dearest for its size first, or what was made first, or last.

Then, at many budgets, the fastest plan that fits is stuffed: from what is live at each point of its step follows where
there is room, and what runs again is saved where it fits, the dearest for its size first. One look at a plan tells that
for all of its ops, so that hardly any have to be tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise

from memfit.planning.simulator import absences
from memfit.planning.step import Step
from memfit.planning.trade_off import Candidate, TradeOff

# How many plans between others a step of one op could pay for, and how many budgets to stuff plans for.
_EFFORT_OPS, _STUFFING_OPS = 5_000_000, 800_000
_NUM_ROUNDS = 2
_NUM_PARTS = 4
_TRIES_PER_HOLE = 3 * (_NUM_PARTS - 1)
# Two plans that are no further apart than this part of all the memory that is to be had follow closely enough.
_NUM_BUDGETS = 128
# What was saved lets others be let go of sooner, which makes room for more.
_MOST_LOOKS = 3


def fill(trade_off: TradeOff) -> None:
    """Add plans where the frontier has holes, to those first that cost the most, and stuffed plans everywhere."""
    num_ops = max(trade_off.step.num_ops, 1)
    num_holes = _EFFORT_OPS // num_ops // (_NUM_ROUNDS * _TRIES_PER_HOLE)
    for _ in range(_NUM_ROUNDS):
        for larger, smaller in islice(_holes(trade_off.frontier()), num_holes):
            trade_off.add_all(_between(trade_off.step, larger, smaller))
    frontier = trade_off.frontier()
    for budget_bytes in _budgets(frontier, min(_STUFFING_OPS // num_ops, _NUM_BUDGETS)):
        stuffed(trade_off, next(plan for plan in frontier if plan.peak_bytes <= budget_bytes), budget_bytes)


def stuffed(trade_off: TradeOff, plan: Candidate, budget_bytes: int) -> Candidate:
    """Return ``plan``, or a faster one that saves more of what it recomputes and keeps within the budget."""
    for _ in range(_MOST_LOOKS):
        ops = _that_fit(trade_off.step, plan, budget_bytes)
        faster = next(_faster(trade_off, plan, ops, budget_bytes), None)
        if faster is None:
            break
        plan = faster
    return plan


def _holes(frontier: list[Candidate]) -> Iterator[tuple[Candidate, Candidate]]:
    """Yield the plans around each hole, largest first: by how much time is lost on average in how much memory."""
    close_bytes = (frontier[0].peak_bytes - frontier[-1].peak_bytes) // _NUM_BUDGETS

    def size(hole: tuple[Candidate, Candidate]) -> float:
        larger, smaller = hole
        return (larger.peak_bytes - smaller.peak_bytes) * (smaller.added_seconds - larger.added_seconds)

    for larger, smaller in sorted(pairwise(frontier), key=size, reverse=True):
        if larger.peak_bytes - smaller.peak_bytes > close_bytes:
            yield larger, smaller


def _between(step: Step, larger: Candidate, smaller: Candidate) -> Iterator[frozenset[int]]:
    def seconds_per_byte(value: int) -> float:
        return step.op_seconds[step.value_op[value]] / max(step.value_bytes[value], 1)

    in_order = sorted(smaller.recomputed - larger.recomputed)
    dearest_first = sorted(in_order, key=seconds_per_byte, reverse=True)
    for part in range(1, _NUM_PARTS):
        num_values = len(in_order) * part // _NUM_PARTS
        yield smaller.recomputed.difference(dearest_first[:num_values])
        yield larger.recomputed.union(in_order[:num_values])
        yield larger.recomputed.union(in_order[num_values:])


def _budgets(frontier: list[Candidate], num_budgets: int) -> Iterable[int]:
    """Return budgets from the smallest peak up, closer to each other at first: there a byte costs the most."""
    high, low = frontier[0].peak_bytes, frontier[-1].peak_bytes
    return sorted({low + int((high - low) * (number / num_budgets) ** 1.5) for number in range(num_budgets)})


def _that_fit(step: Step, plan: Candidate, budget_bytes: int) -> list[int]:
    """Return the ops whose outputs there is room for, to all appearances, the dearest for their size first."""
    memory_bytes, absences_of = absences(step, plan.recomputed)
    room_bytes = budget_bytes - memory_bytes

    def seconds_per_byte(op: int) -> float:
        return step.op_seconds[op] / max(sum(absence.num_bytes for absence in absences_of[op]), 1)

    chosen = []
    for op in sorted(absences_of, key=lambda op: (-seconds_per_byte(op), op)):
        absent = absences_of[op]
        if all(room_bytes[begin:end].min() >= num_bytes for begin, end, num_bytes in absent):
            chosen.append(op)
            for begin, end, num_bytes in absent:
                room_bytes[begin:end] -= num_bytes
    return chosen


def _faster(trade_off: TradeOff, plan: Candidate, ops: list[int], budget_bytes: int) -> Iterator[Candidate]:
    """Yield faster plans within the budget that save the outputs of the first ops: of all, of half of them, and so on.

    Replays that start from what is saved now may hold it for longer than it took to run again.
    """
    while ops:
        saved = {value for op in ops for value in trade_off.step.op_outputs[op]}
        tried = trade_off.add(plan.recomputed - saved)
        if tried.peak_bytes <= budget_bytes and tried.added_seconds < plan.added_seconds:
            yield tried
        ops = ops[: len(ops) // 2]
