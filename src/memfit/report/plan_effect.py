"""What a plan does to each value and each block of a profiled step, in bytes.

A value is *saved* where it is held for the backward pass, because autograd reads it or because a replay starts from
it; *offloaded* where it is in host memory until then; *recomputed* where autograd reads it and it is replayed.
The others are not needed by the backward pass, whatever the plan decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memfit.errors import InvalidParameterError
from memfit.graph.plan import Decision, Plan
from memfit.planning.simulate.simulator import Simulation, simulated
from memfit.planning.step import Step
from memfit.planning.step.offload_rules import Offloading


class Outcome(StrEnum):
    """What becomes of a value between the op that made it and the backward pass, as one letter."""

    SAVED = "s"
    RECOMPUTED = "r"
    OFFLOADED = "o"
    COMPRESSED = "c"
    NOT_NEEDED = "-"


COUNTED_OUTCOMES = (Outcome.SAVED, Outcome.RECOMPUTED, Outcome.OFFLOADED, Outcome.COMPRESSED)

_OUTCOME_OF_DECISION = {
    Decision.SAVE: Outcome.SAVED,
    Decision.RECOMPUTE: Outcome.RECOMPUTED,
    Decision.OFFLOAD: Outcome.OFFLOADED,
    Decision.COMPRESS: Outcome.COMPRESSED,
}


@dataclass(frozen=True, slots=True)
class PlanEffect:
    """``outcomes`` has one entry for each of ``Step.plannable``; the simulation is that of the same decisions."""

    outcomes: tuple[Outcome, ...]
    simulation: Simulation


def plan_effect(step: Step, plan: Plan) -> PlanEffect:
    """Return what ``plan`` does to the step it was made for."""
    recomputed = recomputed_values(step, plan)
    simulation = simulated(step, recomputed, offloading_of(step, plan))
    started_from = {value for op in simulation.replayed_ops for value in step.op_inputs[op]} - recomputed
    values = step.profile.values

    def outcome(index: int) -> Outcome:
        if not values[index].is_saved and index not in started_from:
            return Outcome.NOT_NEEDED
        if index in recomputed:
            return Outcome.RECOMPUTED
        decision = plan.decisions[values[index].name]
        # What the engine cannot replay is saved, whatever the plan decides.
        return Outcome.SAVED if decision is Decision.RECOMPUTE else _OUTCOME_OF_DECISION[decision]

    return PlanEffect(tuple(outcome(index) for index in step.plannable), simulation)


def recomputed_values(step: Step, plan: Plan) -> frozenset[int]:
    """Return the indices of the values that the engine recomputes under ``plan``."""
    if plan.fingerprint != step.profile.fingerprint:
        raise InvalidParameterError(
            f"the plan is for the model {plan.fingerprint!r}, the profile is of {step.profile.fingerprint!r}; "
            "plan again with this profile"
        )
    names = [step.profile.values[index].name for index in step.plannable]
    missing = next((name for name in names if name not in plan.decisions), None)
    if missing is not None:
        raise InvalidParameterError(f"the plan has no decision for the value {missing!r}; plan again with this profile")
    return frozenset(step.recomputed_of(_decided(step, plan, Decision.RECOMPUTE)))


def offloading_of(step: Step, plan: Plan) -> Offloading:
    """Return the values that ``plan`` offloads, and how many of their bytes are copied at a time."""
    return Offloading(_decided(step, plan, Decision.OFFLOAD), plan.window_bytes)


def _decided(step: Step, plan: Plan, decision: Decision) -> frozenset[int]:
    values, decisions = step.profile.values, plan.decisions
    return frozenset(index for index in step.plannable if decisions[values[index].name] is decision)


def bytes_by_block(step: Step, effect: PlanEffect, block_of_value: list[int], num_blocks: int) -> list[list[int]]:
    """Return for each block the bytes of each of ``COUNTED_OUTCOMES``. Values written in place share bytes, once."""
    totals = [[0] * len(COUNTED_OUTCOMES) for _ in range(num_blocks)]
    held_storages: set[int] = set()
    for index, outcome, block in zip(step.plannable, effect.outcomes, block_of_value, strict=True):
        if outcome is Outcome.NOT_NEEDED:
            continue
        if outcome is Outcome.SAVED:
            storage = step.value_storage[index]
            if storage in held_storages:
                continue
            held_storages.add(storage)
        totals[block][COUNTED_OUTCOMES.index(outcome)] += step.value_bytes[index]
    return totals
