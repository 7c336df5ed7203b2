"""The entry points of the simulator: the memory and the extra time of a profiled step under given decisions (`walk`).

``recomputed`` is as `Step.recomputed_of` returns it, everywhere but in `simulate`.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memfit.graph.model_profile import ModelProfile
from memfit.infeasible_budget import LiveBytes
from memfit.planning.simulate.walk import Walk
from memfit.planning.step import Bytes, Step
from memfit.planning.step.offload_rules import NOTHING_OFFLOADED, Offloading


class Judgement(NamedTuple):
    """What planners compare: the peak of the step, the seconds of its replays, and those it takes longer altogether."""

    peak_bytes: int
    recompute_seconds: float
    added_seconds: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """One step under a plan.

    ``timeline_bytes`` has, for each recorded op, the most that is live while it and the replays just before it run.
    ``replayed_ops`` are op indices in the order in which they are run again, which takes ``recompute_seconds``. The
    step takes ``added_seconds`` longer in all. ``live_at_peak`` is largest first.
    """

    peak_bytes: int
    peak_op_index: int
    timeline_bytes: Bytes
    live_at_peak: tuple[LiveBytes, ...]
    recompute_seconds: float
    added_seconds: float
    recompute_flops: int
    replayed_ops: tuple[int, ...]


def simulate(profile: ModelProfile, recomputed: Set[int], offloading: Offloading = NOTHING_OFFLOADED) -> Simulation:
    """Return the step in which the ``recomputed`` values are dropped and replayed; what cannot be replayed is saved."""
    step = Step(profile)
    return simulated(step, step.recomputed_of(frozenset(recomputed)), offloading)


def judged(step: Step, recomputed: Set[int], offloading: Offloading = NOTHING_OFFLOADED) -> Judgement:
    """Return the peak and the extra seconds."""
    walk = Walk(step, recomputed, offloading)
    return Judgement(walk.peak_bytes, walk.recompute_seconds, walk.added_seconds)


def simulated(step: Step, recomputed: Set[int], offloading: Offloading = NOTHING_OFFLOADED) -> Simulation:
    """Return all there is to know."""
    walk = Walk(step, recomputed, offloading)
    starts = np.concatenate([[0], walk.position_of_op[:-1] + 1])
    return Simulation(
        peak_bytes=walk.peak_bytes,
        peak_op_index=walk.peak_op_index,
        timeline_bytes=np.maximum.reduceat(walk.memory_bytes, starts) if step.num_ops else walk.memory_bytes,
        live_at_peak=walk.live_at(walk.peak_position),
        recompute_seconds=walk.recompute_seconds,
        added_seconds=walk.added_seconds,
        recompute_flops=sum(step.profile.ops[op].flops for op in walk.replayed_ops),
        replayed_ops=tuple(walk.replayed_ops),
    )
