"""What was found out about a profile, kept for as long as the profile lives: its step, simulations, explorations.

A profile is known by identity. Its hash would go over every op, and two profiles that are equal may as well be explored
twice. So that nothing here keeps the profile alive, its step looks at a shallow twin of it; when the profile goes, a
finalizer forgets the rest. Several threads may ask at once: one explores, the others wait for what it finds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Set
from dataclasses import replace
from threading import Lock, RLock
from typing import NamedTuple, TypeVar

from memfit.graph.model_profile import ModelProfile
from memfit.planning.candidates.pool import Candidate
from memfit.planning.offload.offload_search import with_offloading
from memfit.planning.search import Exploration, explored, with_lowest_peak
from memfit.planning.simulate.counted_peaks import CountedPeaks
from memfit.planning.simulate.simulator import Simulation, simulated
from memfit.planning.step import Step
from memfit.planning.step.offload_rules import NOTHING_OFFLOADED, Offloading

_Key = TypeVar("_Key", bound=Hashable)
_Found = TypeVar("_Found")

# Beyond this many, the results for selectors and plans that were first asked for longest ago are forgotten.
_MOST_EXPLORATIONS = 8
_MOST_SIMULATIONS = 64
_MOST_PEAKS = 4_096


class _OffloadingFrontier(NamedTuple):
    """The plans that may offload, and the exploration that they come from."""

    exploration: Exploration
    frontier: tuple[Candidate, ...]


class KnownStep:
    """A step and what has been found out about it so far."""

    def __init__(self, profile: ModelProfile) -> None:
        self.step = Step(profile)
        self._counted_peaks = CountedPeaks(self.step)
        self._lock = RLock()
        self._explorations: dict[tuple[frozenset[int], frozenset[int]], Exploration] = {}
        self._offloading: dict[tuple[frozenset[int], frozenset[int], int], _OffloadingFrontier] = {}
        self._simulations: dict[tuple[frozenset[int], Offloading], Simulation] = {}
        self._peaks: dict[Candidate, int] = {}

    def exploration(self, *, forced: Set[int] = frozenset(), kept: Set[int] = frozenset()) -> Exploration:
        """Return what `explored` finds, which looks once for each pair of forced and kept values, and what has been
        found below that since.
        """
        key = frozenset(forced), frozenset(kept)
        return self._found(
            self._explorations, key, lambda: explored(self.step, forced=key[0], kept=key[1]), _MOST_EXPLORATIONS
        )

    def exploration_to_the_lowest_peak(
        self, *, forced: Set[int] = frozenset(), kept: Set[int] = frozenset()
    ) -> Exploration:
        """Return the exploration with what `with_lowest_peak` finds below it, which takes longer than all the rest.

        All later plans are chosen from that: a smaller budget must not have got a faster one.
        """
        with self._lock:
            exploration = self.exploration(forced=forced, kept=kept)
            if not exploration.has_lowest_peak:
                exploration = with_lowest_peak(self.step, exploration, forced=forced, kept=kept)
                self._explorations[frozenset(forced), frozenset(kept)] = exploration
            return exploration

    def frontier(
        self, *, forced: Set[int] = frozenset(), kept: Set[int] = frozenset(), host_budget_bytes: int = 0
    ) -> tuple[Candidate, ...]:
        """Return the plans to choose from, fastest first: those of the exploration, and such that also offload.

        What was once found stays among them when the exploration finds more.
        """
        with self._lock:
            exploration = self.exploration(forced=forced, kept=kept)
            if not host_budget_bytes:
                return exploration.frontier
            key = frozenset(forced), frozenset(kept), host_budget_bytes
            found = self._offloading.get(key)
            if found is None or found.exploration is not exploration:
                earlier = () if found is None else found.frontier
                frontier = with_offloading(
                    self.step, exploration.frontier, host_budget_bytes, forced=forced, kept=kept, earlier=earlier
                )
                self._offloading.pop(key, None)
                found = self._found(
                    self._offloading, key, lambda: _OffloadingFrontier(exploration, frontier), _MOST_EXPLORATIONS
                )
            return found.frontier

    def simulation(self, recomputed: Set[int], offloading: Offloading = NOTHING_OFFLOADED) -> Simulation:
        """Return what `simulated` says of the plan."""
        key = frozenset(recomputed), offloading
        return self._found(self._simulations, key, lambda: simulated(self.step, *key), _MOST_SIMULATIONS)

    def peak_bytes(self, plan: Candidate) -> int:
        """Return the peak of a plan as the device's allocator counts it."""
        return self._found(self._peaks, plan, lambda: self._counted_peaks.peak_bytes(plan), _MOST_PEAKS)

    @property
    def margin_bytes(self) -> int:
        """How much more than its buffers take is counted at least for every plan but the plain step."""
        return self._counted_peaks.margin_bytes

    def _found(self, known: dict[_Key, _Found], key: _Key, find: Callable[[], _Found], most: int) -> _Found:
        with self._lock:
            if key not in known:
                if len(known) >= most:
                    del known[next(iter(known))]
                known[key] = find()
            return known[key]


_known: dict[int, KnownStep] = {}
_known_lock = Lock()


def known_step(profile: ModelProfile) -> KnownStep:
    """Return what is known of this very profile."""
    key = id(profile)
    known = _known.get(key)
    if known is None:
        made = KnownStep(replace(profile))
        with _known_lock:
            known = _known.setdefault(key, made)
            if known is made:
                # No lock there: the collector may run it at any moment, also while this thread holds the lock. The
                # key is free before another object can have the same identity.
                weakref.finalize(profile, _known.pop, key, None).atexit = False
    return known
