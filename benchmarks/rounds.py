"""Interleaved rounds: ways take turns, each for about as long, and what was disturbed is timed again."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence

import torch
from entrant import Entrant
from quiet_host import QuietHost
from timing import Step, TimedStep, no_garbage_collection, seconds_in_a_row, watched_in_a_row
from torch import nn

# A slow way takes part in so many rounds, with one timed step in each.
_ROUNDS_OF_SLOW_WAYS = 2
# Before a way's steps are timed, it runs for so long, and at least one step: until host and device are as far apart as
# they stay, which takes short steps several of them.
_LEAD_IN_SECONDS, _MOST_LEAD_IN_STEPS = 0.3, 6
# In each round its steps are then timed for so long, unless their number is told; and not fewer steps or more.
_TIMED_SECONDS, _FEWEST_TIMED_STEPS, _MOST_TIMED_STEPS = 0.4, 2, 10
# What is disturbed again and again is taken as it is.
_MOST_TRIES = 6
# The way that all are compared with takes its turn again after so many others: an error of its is one of all.
_OTHERS_BETWEEN_FIRST = 8


class Stopwatch:
    """Times steps of the way that was entered."""

    def __init__(self, step: Step, model: nn.Module, device: torch.device) -> None:
        self._step = step
        self._model = model
        self._device = device
        # Whom to ask whether steps were disturbed, if anybody.
        self.host: QuietHost | None = None

    def time(self, entrant: Entrant, num_steps: int | None, limit_seconds: float = math.inf) -> None:
        """Time steps of the entrant: ``num_steps`` that nobody disturbed, if it has so many within the limit."""
        # Nothing else is there to be collected: what was there before the rounds is left out.
        gc.collect()
        num_lead_in = _num_steps_in(_LEAD_IN_SECONDS, entrant, 1, _MOST_LEAD_IN_STEPS)
        if num_steps is None:
            num_steps = _num_steps_in(_TIMED_SECONDS, entrant, _FEWEST_TIMED_STEPS, _MOST_TIMED_STEPS)
        if entrant.is_slow:
            num_lead_in, num_steps = 1, 1
        if self.host is None:
            seconds = seconds_in_a_row(self._step, self._device, num_steps, num_lead_in_steps=num_lead_in)
            entrant.steps += map(TimedStep, seconds)
        else:
            entrant.steps += self._watched(self.host, num_steps, num_lead_in, limit_seconds)

    def _watched(self, host: QuietHost, num_steps: int, num_lead_in: int, limit_seconds: float) -> list[TimedStep]:
        end_by = time.perf_counter() + limit_seconds
        steps: list[TimedStep] = []
        for _ in range(_MOST_TRIES):
            host.settle()
            steps += watched_in_a_row(
                self._step, self._model, host.look, self._device, num_steps, num_lead_in_steps=num_lead_in
            )
            num_quiet = sum(step.look_seconds is not None and host.is_quiet(step.look_seconds) for step in steps)
            if num_quiet >= num_steps or time.perf_counter() >= end_by:
                break
        return steps


def run_rounds(
    entrants: Sequence[Entrant],
    take_turn: Callable[[Entrant, float], None],
    num_rounds: int,
    *,
    fewest_rounds: int = 1,
    end_by: float | None = None,
) -> int:
    """Have all entrants ``take_turn``, each with so many seconds at most, round after round; return how many rounds.

    After ``fewest_rounds``, a round that would not end before ``end_by`` (of time.perf_counter) is not begun. Slow ways
    come after all the others: they leave the device idle, and cold.
    """
    order = _turns([entrant for entrant in entrants if not entrant.is_slow])
    with no_garbage_collection():
        for number in range(num_rounds):
            begin = time.perf_counter()
            # As if no more rounds than have to be were to come.
            round_ends_by = None if end_by is None else begin + (end_by - begin) / max(fewest_rounds - number, 1)
            _run_round(order, take_turn, round_ends_by)
            # There and back again: what drifts with the machine's warmth cancels out.
            order.reverse()
            now = time.perf_counter()
            if end_by is not None and number + 1 >= fewest_rounds and now + (now - begin) > end_by:
                num_rounds = number + 1
                break
        slow = [entrant for entrant in entrants if entrant.is_slow]
        for _ in range(min(num_rounds, _ROUNDS_OF_SLOW_WAYS)):
            _run_round(slow, take_turn, end_by)
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


def _run_round(order: Sequence[Entrant], take_turn: Callable[[Entrant, float], None], end_by: float | None) -> None:
    left = [entrant for entrant in order if entrant.error is None]
    while left:
        entrant = left.pop(0)
        # Its share of the time that is left: on a host that is never quiet, waiting for it would take all of it.
        limit_seconds = math.inf if end_by is None else (end_by - time.perf_counter()) / (len(left) + 1)
        take_turn(entrant, limit_seconds)


def _num_steps_in(seconds: float, entrant: Entrant, fewest: int, most: int) -> int:
    return min(max(math.ceil(seconds / entrant.rough_seconds), fewest), most)
