"""The plans to choose from: judged by the simulator, and of them those that no other beats in both peak and seconds."""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import cached_property
from typing import NamedTuple

from memfit.planning.candidates.segments import segmented_choices
from memfit.planning.simulate.simulator import Judgement, judged
from memfit.planning.step import Step
from memfit.planning.step.offload_rules import NOTHING_OFFLOADED, Offloading


class Candidate(NamedTuple):
    """A set of values to recompute, as the engine would, others to offload, and what the simulator says of it."""

    recomputed: frozenset[int]
    peak_bytes: int
    recompute_seconds: float
    added_seconds: float
    offloading: Offloading = NOTHING_OFFLOADED


class TradeOff:
    """Every candidate seen so far for one step. ``forced`` values are recomputed in all, ``kept`` ones in none.

    ``is_exact`` says that no plan was left out that could matter.
    """

    def __init__(self, step: Step, *, forced: Set[int] = frozenset(), kept: Set[int] = frozenset()) -> None:
        self.step = step
        self.may_be_recomputed = frozenset(step.may_be_recomputed - kept)
        self._forced = frozenset(forced - kept)
        self.is_exact = False
        self._judgements: dict[frozenset[int], Judgement] = {}

    @cached_property
    def segmentations(self) -> list[tuple[set[int], set[int]]]:
        """What to hold and what to recompute, with borders between segments of the step (`segments`)."""
        return list(segmented_choices(self.step))

    @property
    def is_free(self) -> bool:
        """Whether no value has to be recomputed."""
        return not self._forced

    def add(self, wanted: Set[int]) -> Candidate:
        """Judge what the engine makes of recomputing the ``wanted`` values."""
        recomputed = frozenset(self.step.recomputed_of((wanted | self._forced) & self.may_be_recomputed))
        judgement = self._judgements.get(recomputed)
        if judgement is None:
            judgement = self._judgements[recomputed] = judged(self.step, recomputed)
        return Candidate(recomputed, *judgement)

    def add_all(self, choices: Iterable[Set[int]]) -> None:
        """Judge each of the ``choices``."""
        for wanted in choices:
            self.add(wanted)

    def frontier(self) -> list[Candidate]:
        """Return the candidates that none beats, fastest first: each is slower and smaller than the one before.

        Of equal ones the one that recomputes fewer values stays; which are seen first does not matter.
        """
        best: list[Candidate] = []
        entries = [Candidate(recomputed, *judgement) for recomputed, judgement in self._judgements.items()]
        entries.sort(key=lambda c: (c.added_seconds, c.peak_bytes, len(c.recomputed), sorted(c.recomputed)))
        for candidate in entries:
            if not best or candidate.peak_bytes < best[-1].peak_bytes:
                best.append(candidate)
        return best
