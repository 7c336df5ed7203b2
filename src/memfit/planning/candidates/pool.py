"""The pool of candidates: every plan that was proposed, simulated once. The Pareto-optimal ones are the frontier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from memfit.planning.simulate.simulator import Judgement, judged
from memfit.planning.step import Step
from memfit.planning.step.offload_rules import NOTHING_OFFLOADED, Offloading


class Candidate(NamedTuple):
    """A set of values to recompute, others to offload, and the simulated peak and seconds."""

    recomputed: frozenset[int]
    peak_bytes: int
    recompute_seconds: float
    added_seconds: float
    offloading: Offloading = NOTHING_OFFLOADED


class Pool:
    """Every candidate so far for one step. ``forced`` values are recomputed in all of them, ``kept`` ones in none."""

    def __init__(self, step: Step, *, forced: Set[int] = frozenset(), kept: Set[int] = frozenset()) -> None:
        self.step = step
        kept = step.alike.with_others(kept)
        self.may_be_recomputed = frozenset(step.may_be_recomputed - kept)
        self._forced = step.alike.with_others(forced) - kept
        self._judgements: dict[frozenset[int], Judgement] = {}

    def add(self, wanted: Set[int]) -> Candidate:
        """Simulate what the engine makes of recomputing the ``wanted`` values, unless it is in the pool already.

        Where only some of the values are wanted that share a decision, none is recomputed, or, in another plan, all.
        """
        if self.step.alike:
            self._add(self.step.alike.with_others(wanted))
        return self._add(wanted)

    def _add(self, wanted: Set[int]) -> Candidate:
        recomputed = frozenset(self.step.recomputed_of((wanted | self._forced) & self.may_be_recomputed))
        judgement = self._judgements.get(recomputed)
        if judgement is None:
            judgement = self._judgements[recomputed] = judged(self.step, recomputed)
        return Candidate(recomputed, *judgement)

    def add_all(self, choices: Iterable[Set[int]]) -> None:
        """Add each of the ``choices``."""
        for wanted in choices:
            self.add(wanted)

    def frontier(self) -> list[Candidate]:
        """Return the Pareto-optimal candidates, fastest first."""
        return pareto_optimal(Candidate(recomputed, *judgement) for recomputed, judgement in self._judgements.items())


def pareto_optimal(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the Pareto-optimal candidates, fastest first: each is slower and smaller than the one before.

    Of equal ones the one that drops fewer values stays.
    """
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=_order):
        if not best or candidate.peak_bytes < best[-1].peak_bytes:
            best.append(candidate)
    return best


def _order(plan: Candidate) -> tuple[float, int, int, int]:
    return plan.added_seconds, plan.peak_bytes, len(plan.offloading.values), len(plan.recomputed)


def spread(frontier: Sequence[Candidate], most: int) -> list[Candidate]:
    """Return at most so many plans, spread evenly over the memory between the largest and the smallest."""
    high, low = frontier[0].peak_bytes, frontier[-1].peak_bytes
    bounds = [high - (high - low) * number // max(most - 1, 1) for number in range(most)]
    places = {next(place for place, plan in enumerate(frontier) if plan.peak_bytes <= bound) for bound in bounds}
    return [frontier[place] for place in sorted(places)]
