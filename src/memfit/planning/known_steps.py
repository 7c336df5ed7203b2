"""What was found for a profile, kept for as long as the profile lives: its step, simulations, explorations.

Profiles are compared by identity, since hashing one would read every op. The step refers to a shallow copy, so that
nothing here keeps the profile alive; when the profile is freed, a finalizer removes its entries. Where several threads
need one profile at the same time, one explores and the others wait for the result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from threading import Lock, RLock
from typing import ParamSpec, TypeVar

from memfit.graph.model_profile import ModelProfile
from memfit.planning.candidates.pool import Candidate
from memfit.planning.forced import NOTHING_FORCED, Forced
from memfit.planning.offload.offload_search import with_offloading
from memfit.planning.search import Exploration, explored
from memfit.planning.simulate.counted_peaks import CountedPeaks
from memfit.planning.simulate.simulator import Simulation, simulated
from memfit.planning.step import Step
from memfit.planning.step.offload_rules import NOTHING_OFFLOADED, Offloading

_Arguments = ParamSpec("_Arguments")
_Found = TypeVar("_Found")


class KnownStep:
    """A step and what has been found for it so far."""

    def __init__(self, profile: ModelProfile) -> None:
        self.step = Step(profile)
        counted_peaks = CountedPeaks(self.step)
        self.margin_bytes = counted_peaks.margin_bytes
        """How much more than its buffers take is counted at least for every plan but the plain step."""
        lock = RLock()
        self.exploration = _remembered(lock, 8, self._explored)
        self.frontier = _remembered(lock, 8, self._frontier)
        self.simulation = _remembered(lock, 64, self._simulated)
        self.peak_bytes = _remembered(lock, 4_096, counted_peaks.peak_bytes)

    def _explored(self, forced: Forced = NOTHING_FORCED) -> Exploration:
        return explored(self.step, forced=forced.recomputed, kept=forced.saved)

    def _frontier(self, forced: Forced, host_budget_bytes: int) -> tuple[Candidate, ...]:
        """Return the plans to choose from, fastest first: those of the exploration, and such that also offload."""
        frontier = self.exploration(forced).frontier
        if not host_budget_bytes:
            return frontier
        return with_offloading(self.step, frontier, host_budget_bytes, forced=forced.recomputed, kept=forced.saved)

    def _simulated(self, recomputed: frozenset[int], offloading: Offloading = NOTHING_OFFLOADED) -> Simulation:
        return simulated(self.step, recomputed, offloading)


def _remembered(lock: RLock, most: int, find: Callable[_Arguments, _Found]) -> Callable[_Arguments, _Found]:
    """Return ``find`` such that it finds each result once, as long as it is among the last ``most``."""
    cached = lru_cache(most)(find)

    def found(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Found:
        with lock:
            return cached(*arguments, **keywords)  # type: ignore[arg-type]

    return found


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
