"""Interleaved rounds: methods take turns, each for about as long."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence

import torch
from entrant import Entrant
from timing import Step, no_garbage_collection, seconds_in_a_row

# A slow method takes part in so many rounds, with one timed step in each.
_ROUNDS_OF_SLOW_WAYS = 2
# Before a method's steps are timed, it runs for so long, and at least one step: until the host is as far ahead of the
# device as it stays.
_LEAD_IN_SECONDS, _MOST_LEAD_IN_STEPS = 0.3, 6
# In each round its steps are then timed for so long, unless their number is given; and not fewer steps or more.
_TIMED_SECONDS, _FEWEST_TIMED_STEPS, _MOST_TIMED_STEPS = 0.4, 2, 10
# The method that all are compared with takes its turn again after so many others: an error of its is one of all.
_OTHERS_BETWEEN_FIRST = 8


class Stopwatch:
    """Times steps of the method that was entered."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self._step = step
        self._device = device

    def time(self, entrant: Entrant, num_steps: int | None) -> None:
        """Time ``num_steps`` steps of the entrant; without a number, as many as fit a fixed time."""
        # Nothing else is there to be collected: what was there before the rounds is left out.
        gc.collect()
        num_lead_in = _num_steps_in(_LEAD_IN_SECONDS, entrant, 1, _MOST_LEAD_IN_STEPS)
        if num_steps is None:
            num_steps = _num_steps_in(_TIMED_SECONDS, entrant, _FEWEST_TIMED_STEPS, _MOST_TIMED_STEPS)
        if entrant.is_slow:
            num_lead_in, num_steps = 1, 1
        entrant.seconds += seconds_in_a_row(self._step, self._device, num_steps, num_lead_in_steps=num_lead_in)


def run_rounds(
    entrants: Sequence[Entrant],
    take_turn: Callable[[Entrant], None],
    num_rounds: int,
    *,
    fewest_rounds: int = 1,
    end_by: float | None = None,
) -> int:
    """Have all entrants ``take_turn``, round after round; return how many rounds.

    After ``fewest_rounds``, a round that would not end before ``end_by`` (of time.perf_counter) is not begun. Slow
    methods come after all the others: they leave the device idle, and cold.
    """
    order = _turns([entrant for entrant in entrants if not entrant.is_slow])
    with no_garbage_collection():
        for number in range(num_rounds):
            begin = time.perf_counter()
            _run_round(order, take_turn)
            # There and back again: what drifts with the machine's warmth cancels out.
            order.reverse()
            now = time.perf_counter()
            if end_by is not None and number + 1 >= fewest_rounds and now + (now - begin) > end_by:
                num_rounds = number + 1
                break
        slow = [entrant for entrant in entrants if entrant.is_slow]
        for _ in range(min(num_rounds, _ROUNDS_OF_SLOW_WAYS)):
            _run_round(slow, take_turn)
    return num_rounds


def _turns(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Return who is timed in a round, one after the other: the first again and again."""
    first, *others = entrants
    turns = [first]
    for number, entrant in enumerate(others):
        if number and number % _OTHERS_BETWEEN_FIRST == 0:
            turns.append(first)
        turns.append(entrant)
    return turns


def _run_round(order: Sequence[Entrant], take_turn: Callable[[Entrant], None]) -> None:
    for entrant in order:
        if entrant.error is None:
            take_turn(entrant)


def _num_steps_in(seconds: float, entrant: Entrant, fewest: int, most: int) -> int:
    return min(max(math.ceil(seconds / entrant.rough_seconds), fewest), most)
