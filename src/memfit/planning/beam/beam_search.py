"""Beam search for plans of low peaks: decide on the ops of the forward pass, the last one first.

Of the partial plans (`partial_plans`), those of least ``peak + rate · seconds`` stay, for each of several rates. A rate
of 0 leads to the smallest peak, higher ones to plans that take a little more memory and less time. Of rows that leave
the same to decide, one stays for each rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import numpy as np

from memfit.planning.beam.partial_plans import Ints, PartialPlans
from memfit.planning.candidates.pool import Pool
from memfit.planning.step import Step

# Multiples of the bytes that the frontier so far saves per second.
_RATES = (0.0, 0.1, 0.2, 0.3, 0.45, 0.6, 0.9, 1.2, 2.0, 4.0)
# How many rows a step of one op could pay for, for each rate, and the limits to their number.
_EFFORT_OPS, _FEWEST_ROWS, _MOST_ROWS = 20_000, 6, 12
# Searches in which one value is held: how many a step of one op could pay for, and the limits to their number.
_EFFORT_OF_HOLDING, _FEWEST_HELD, _MOST_HELD = 3_600, 8, 24
# How much more effort goes into the smallest peak, which is the hardest to find.
_MORE_EFFORT = 4


def low_peaks(pool: Pool) -> Iterator[frozenset[int]]:
    """Yield plans of low peaks.

    Leaving this out raises the smallest peak by 16 % on average, and up to 55 % (`benchmarks/ablation.py`).
    """
    frontier, num_ops = pool.frontier(), max(pool.step.num_ops, 1)
    saved_bytes = frontier[0].peak_bytes - frontier[-1].peak_bytes
    seconds = frontier[-1].added_seconds - frontier[0].added_seconds
    rates = [rate * saved_bytes / max(seconds, 1e-9) for rate in _RATES]
    num_rows = min(max(_EFFORT_OPS // num_ops, _FEWEST_ROWS), _MOST_ROWS)
    yield from beam_search(pool.step, pool.may_be_recomputed, rates=rates, rows_per_rate=num_rows)
    if _EFFORT_OF_HOLDING // num_ops >= _FEWEST_HELD:
        yield from _with_one_value_held(pool, min(_EFFORT_OF_HOLDING // num_ops, _MOST_HELD))


def _with_one_value_held(pool: Pool, num_searches: int) -> Iterator[frozenset[int]]:
    """Yield what is found when one of the largest values that the smallest plan recomputes is held instead.

    The search decides on early ops last, when it has forgotten the partial plans that would have suited them.
    """
    step, smallest = pool.step, pool.frontier()[-1].recomputed
    saved = [value for value in smallest if step.saves_of_value[value]]
    largest_first = sorted(saved, key=lambda value: (-step.value_bytes[value], value))
    for value in largest_first[:num_searches]:
        yield from beam_search(step, pool.may_be_recomputed - {value}, rates=(0.0,), rows_per_rate=1)


def beam_search(
    step: Step, may_be_recomputed: Set[int], *, rates: Sequence[float], rows_per_rate: int
) -> list[frozenset[int]]:
    """Return what to recompute in the plans that are found, the smallest first. Rates are in bytes per second."""
    plans = PartialPlans(step, may_be_recomputed)
    # For each op: what it may drop, the row that each row came from, and the choice that it made.
    history: list[_Decision] = []
    for op in range(step.close_time, -1, -1):
        if not step.op_outputs[op]:
            continue
        choices = plans.choices(op)
        rows_of_choice = [plans.may_choose(op, frozenset(dropped)) for dropped in choices]
        before = np.concatenate(rows_of_choice)
        chosen = np.repeat(np.arange(len(choices)), [len(rows) for rows in rows_of_choice])
        plans.take(before)
        plans.decide(op, choices, chosen)
        if len(choices) > 1:
            kept = _most_promising(plans, rates, rows_per_rate)
            plans.take(kept)
            history.append(_Decision(choices, before[kept], chosen[kept]))
    return [_dropped(history, int(row)) for row in np.argsort(plans.peaks(), kind="stable")]


class _Decision(NamedTuple):
    choices: list[tuple[int, ...]]
    before: Ints
    chosen: Ints


def _most_promising(plans: PartialPlans, rates: Sequence[float], rows_per_rate: int) -> Ints:
    peaks, states = plans.peaks(), plans.states()
    chosen: list[Ints] = []
    for rate in rates:
        order = np.lexsort((plans.seconds, peaks + rate * plans.seconds))
        firsts = np.sort(np.unique(states[order], return_index=True)[1])
        chosen.append(order[firsts[: rows_per_rate if rate else _MORE_EFFORT * rows_per_rate]])
    return np.unique(np.concatenate(chosen))


def _dropped(history: Sequence[_Decision], row: int) -> frozenset[int]:
    dropped: set[int] = set()
    for decision in reversed(history):
        dropped.update(decision.choices[int(decision.chosen[row])])
        row = int(decision.before[row])
    return frozenset(dropped)
