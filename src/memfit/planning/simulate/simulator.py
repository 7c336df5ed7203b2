"""The judge of every plan: tells the memory and the extra work of a profiled step under given decisions (`walk`)."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memfit.graph.model_profile import ModelProfile
from memfit.planning.simulate.traffic import Traffic
from memfit.planning.simulate.walk import LiveBytes, Restoration, Walk
from memfit.planning.step import Bytes, Step
from memfit.planning.step.offload_rules import NOTHING_OFFLOADED, Offloading


class Judgement(NamedTuple):
    """What planners compare: the peak of the step, the seconds of its replays, and those it takes longer altogether."""

    peak_bytes: int
    recompute_seconds: float
    added_seconds: float


class Absences(NamedTuple):
    """What is live at each position of the step under a plan, and which values are absent when."""

    memory_bytes: Bytes
    restorations: list[Restoration]


@dataclass(frozen=True, slots=True)
class Simulation:
    """One step under a plan.

    ``timeline_bytes`` has, for each recorded op, the most that is live while it and the replays just before it run.
    ``replayed_ops`` are op indices in the order in which they are run again, which takes ``recompute_seconds``. The
    device waits ``waiting_seconds`` for copies to and from the host. The step takes ``added_seconds`` longer in all.
    ``live_at_peak`` is largest first.
    """

    peak_bytes: int
    peak_op_index: int
    timeline_bytes: Bytes
    live_at_peak: tuple[LiveBytes, ...]
    recompute_seconds: float
    added_seconds: float
    recompute_flops: int
    replayed_ops: tuple[int, ...]
    waiting_seconds: float = 0.0


def simulate(profile: ModelProfile, recomputed: Set[int], offloading: Offloading = NOTHING_OFFLOADED) -> Simulation:
    """Return what the step does when the values with the indices in ``recomputed`` are dropped and brought back.

    What the engine cannot bring back is saved, as it would be.
    """
    step = Step(profile)
    return simulated(step, step.recomputed_of(frozenset(recomputed)), offloading)


def judged(step: Step, recomputed: Set[int], offloading: Offloading = NOTHING_OFFLOADED) -> Judgement:
    """Return the peak and the extra seconds; ``recomputed`` is as `Step.recomputed_of` returns it."""
    walk = Walk(step, recomputed, offloading)
    return Judgement(walk.peak_bytes, walk.recompute_seconds, walk.added_seconds)


def simulated(step: Step, recomputed: Set[int], offloading: Offloading = NOTHING_OFFLOADED) -> Simulation:
    """Return all there is to know; ``recomputed`` is as `Step.recomputed_of` returns it."""
    walk = Walk(step, recomputed, offloading)
    peak_position = int(walk.memory_bytes.argmax()) if step.num_ops else 0
    starts = np.concatenate([[0], walk.position_of_op[:-1] + 1]) if step.num_ops else np.zeros(0, dtype=np.int64)
    timeline = np.maximum.reduceat(walk.memory_bytes, starts) if step.num_ops else walk.memory_bytes
    return Simulation(
        peak_bytes=walk.peak_bytes,
        peak_op_index=int(np.searchsorted(walk.position_of_op, peak_position)),
        timeline_bytes=timeline,
        live_at_peak=walk.live_at(peak_position),
        recompute_seconds=walk.recompute_seconds,
        added_seconds=walk.added_seconds,
        recompute_flops=sum(step.profile.ops[op].flops for op in walk.replayed_ops),
        replayed_ops=tuple(walk.replayed_ops),
        waiting_seconds=sum(walk.waiting),
    )


def traffic_of(step: Step, recomputed: Set[int], offloading: Offloading = NOTHING_OFFLOADED) -> Traffic:
    """Return all that the step allocates; ``recomputed`` is as `Step.recomputed_of` returns it."""
    return Walk(step, recomputed, offloading).traffic()


def absences(step: Step, recomputed: Set[int], offloading: Offloading = NOTHING_OFFLOADED) -> Absences:
    """Return where there would be more if some values were not dropped; ``recomputed`` is as for `simulated`."""
    walk = Walk(step, recomputed, offloading)
    return Absences(walk.memory_bytes, list(walk.restorations()))


def peak_op_index(step: Step, recomputed: Set[int]) -> int:
    """Return the op at which, or just before which, most is live; ``recomputed`` is as for `simulated`."""
    walk = Walk(step, recomputed)
    return int(np.searchsorted(walk.position_of_op, int(walk.memory_bytes.argmax())))


def ops_memory_bytes(step: Step, recomputed: Set[int]) -> Bytes:
    """Return what is live while each op of the step runs; ``recomputed`` is as `Step.recomputed_of` returns it."""
    walk = Walk(step, recomputed)
    memory_bytes: Bytes = walk.memory_bytes[walk.position_of_op]
    return memory_bytes
