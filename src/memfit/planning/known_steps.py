"""What was found for a profile, kept for as long as the profile lives: its step, simulations, explorations.

A profile is known by identity: its hash would go over every op. So that nothing here keeps the profile alive, its step
looks at a shallow twin of it; when the profile goes, a finalizer forgets the rest. Several threads may ask at once: one
explores, the others wait for what it finds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Set
from dataclasses import replace
from threading import Lock, RLock
from typing import Generic, TypeVar

from memfit.graph.model_profile import ModelProfile
from memfit.planning.candidates.pool import Candidate
from memfit.planning.offload.offload_search import with_offloading
from memfit.planning.search import Exploration, explored
from memfit.planning.simulate.counted_peaks import CountedPeaks
from memfit.planning.simulate.simulator import Simulation, simulated
from memfit.planning.step import Step
from memfit.planning.step.offload_rules import NOTHING_OFFLOADED, Offloading

_Key = TypeVar("_Key", bound=Hashable)
_Found = TypeVar("_Found")


class _Memory(Generic[_Key, _Found]):
    """Results by key; beyond ``most``, the oldest are forgotten."""

    def __init__(self, lock: RLock, most: int) -> None:
        self._lock, self._most = lock, most
        self._known: dict[_Key, _Found] = {}

    def found(self, key: _Key, find: Callable[[], _Found]) -> _Found:
        with self._lock:
            if key not in self._known:
                found = find()
                if len(self._known) >= self._most:
                    del self._known[next(iter(self._known))]
                self._known[key] = found
            return self._known[key]


class KnownStep:
    """A step and what has been found for it so far."""

    def __init__(self, profile: ModelProfile) -> None:
        self.step = Step(profile)
        self._counted_peaks = CountedPeaks(self.step)
        lock = RLock()
        self._explorations: _Memory[tuple[frozenset[int], frozenset[int]], Exploration] = _Memory(lock, 8)
        self._offloading: _Memory[tuple[Exploration, int], tuple[Candidate, ...]] = _Memory(lock, 8)
        self._simulations: _Memory[tuple[frozenset[int], Offloading], Simulation] = _Memory(lock, 64)
        self._peaks: _Memory[Candidate, int] = _Memory(lock, 4_096)

    def exploration(self, *, forced: Set[int] = frozenset(), kept: Set[int] = frozenset()) -> Exploration:
        """Return what `explored` finds, which looks once for each pair of forced and kept values."""
        key = frozenset(forced), frozenset(kept)
        return self._explorations.found(key, lambda: explored(self.step, forced=key[0], kept=key[1]))

    def frontier(
        self, *, forced: Set[int] = frozenset(), kept: Set[int] = frozenset(), host_budget_bytes: int = 0
    ) -> tuple[Candidate, ...]:
        """Return the plans to choose from, fastest first: those of the exploration, and such that also offload."""
        exploration = self.exploration(forced=forced, kept=kept)
        if not host_budget_bytes:
            return exploration.frontier
        return self._offloading.found(
            (exploration, host_budget_bytes),
            lambda: with_offloading(
                self.step, exploration.frontier, host_budget_bytes, forced=frozenset(forced), kept=frozenset(kept)
            ),
        )

    def simulation(self, recomputed: Set[int], offloading: Offloading = NOTHING_OFFLOADED) -> Simulation:
        """Return the simulation of a plan."""
        key = frozenset(recomputed), offloading
        return self._simulations.found(key, lambda: simulated(self.step, *key))

    def peak_bytes(self, plan: Candidate) -> int:
        """Return the peak of a plan as the device's allocator counts it."""
        return self._peaks.found(plan, lambda: self._counted_peaks.peak_bytes(plan))

    @property
    def margin_bytes(self) -> int:
        """How much more than its buffers take is counted at least for every plan but the plain step."""
        return self._counted_peaks.margin_bytes


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
