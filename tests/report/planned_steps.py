"""Plans for profiles, written down by the values that they recompute."""

from __future__ import annotations

from collections.abc import Set

from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import Decision, FrontierPoint, Plan
from memfit.planning.simulate.simulator import simulated
from memfit.planning.step import Step
from memfit.planning.step.offload_rules import Offloading


def point_recomputing(
    profile: ModelProfile,
    recomputed: Set[int],
    other: dict[int, Decision] | None = None,
    window_bytes: int = 0,
) -> FrontierPoint:
    """Return the plan that recomputes these values and does with the ``other`` ones as it says."""
    step = Step(profile)
    decisions = {index: Decision.RECOMPUTE if index in recomputed else Decision.SAVE for index in step.plannable}
    decisions |= other or {}
    offloaded = frozenset(index for index, decision in decisions.items() if decision is Decision.OFFLOAD)
    host_bytes = sum(step.value_bytes[index] for index in offloaded)
    simulation = simulated(step, step.recomputed_of(recomputed), Offloading(offloaded, window_bytes))
    named = {profile.values[index].name: decision for index, decision in decisions.items()}
    plan = Plan(
        named,
        (),
        (),
        simulation.recompute_flops,
        profile.fingerprint,
        predicted_peak_bytes=simulation.peak_bytes,
        host_bytes=host_bytes,
        window_bytes=window_bytes,
    )
    overhead = simulation.recompute_seconds / profile.step_seconds if profile.step_seconds else 0.0
    return FrontierPoint(simulation.peak_bytes, overhead, plan)
