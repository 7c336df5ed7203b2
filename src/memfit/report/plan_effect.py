"""What a plan does to each value and each block of a profiled step, in bytes.

A value is *saved* where it is held for the backward pass, because autograd reads it or because a replay starts from
it; *offloaded* where it is in host memory until then; *recomputed* where autograd reads it and it is replayed.
The others are not needed by the backward pass, whatever the plan decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.errors import InvalidParameterError
from memfit.graph.names import is_within
from memfit.graph.plan import Decision, Plan
from memfit.planning.simulate.simulator import Simulation, simulated
from memfit.planning.step import Step
from memfit.planning.step.offload_rules import Offloading

LETTERS = {Decision.SAVE: "s", Decision.RECOMPUTE: "r", Decision.OFFLOAD: "o", Decision.COMPRESS: "c", None: "-"}
"""What becomes of a value as one letter; None is not needed by the backward pass."""


@dataclass(frozen=True, slots=True)
class PlanEffect:
    """What becomes of each of ``Step.plannable``, None where the backward pass does not need it, and the simulation."""

    outcomes: tuple[Decision | None, ...]
    simulation: Simulation


def plan_effect(step: Step, plan: Plan) -> PlanEffect:
    """Return what ``plan`` does to the step it was made for."""
    recomputed = recomputed_values(step, plan)
    simulation = simulated(step, recomputed, offloading_of(step, plan))
    started_from = {value for op in simulation.replayed_ops for value in step.op_inputs[op]} - recomputed
    values = step.profile.values

    def outcome(index: int) -> Decision | None:
        if not values[index].is_saved and index not in started_from:
            return None
        if index in recomputed:
            return Decision.RECOMPUTE
        decision = plan.decisions[values[index].name]
        # What the engine cannot replay is saved, whatever the plan decides.
        return Decision.SAVE if decision is Decision.RECOMPUTE else decision

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


class BlockTable:
    """The blocks of the model and, last, what lies in none; ``of_value`` goes with ``Step.plannable``."""

    def __init__(self, step: Step) -> None:
        paths = [block.path for block in step.profile.blocks]
        self.labels = [*paths, "outside the blocks"]
        # Blocks of one list of modules are of one kind.
        self.kinds = [*(path.rpartition(".")[0] for path in paths), "outside the blocks"]
        block_of_module: dict[str, int] = {}
        self.of_value: list[int] = []
        for index in step.plannable:
            module = step.profile.ops[step.value_op[index]].module or ""
            if module not in block_of_module:
                around = [number for number, path in enumerate(paths) if is_within(module, path)]
                # Blocks may lie in one another; a value belongs to the innermost.
                block_of_module[module] = max(around, key=lambda number: len(paths[number]), default=len(paths))
            self.of_value.append(block_of_module[module])


def bytes_by_block(step: Step, effect: PlanEffect, blocks: BlockTable) -> list[list[int]]:
    """Return for each block the bytes of each decision, in their order. Values written in place share bytes, once."""
    decisions = tuple(Decision)
    totals = [[0] * len(decisions) for _ in blocks.labels]
    held_storages: set[int] = set()
    for index, outcome, block in zip(step.plannable, effect.outcomes, blocks.of_value, strict=True):
        if outcome is None:
            continue
        if outcome is Decision.SAVE:
            storage = step.value_storage[index]
            if storage in held_storages:
                continue
            held_storages.add(storage)
        totals[block][decisions.index(outcome)] += step.value_bytes[index]
    return totals
