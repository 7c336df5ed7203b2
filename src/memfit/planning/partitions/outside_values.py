"""What the eager engine records to recompute values outside compiled blocks: where they are made and saved, no more."""

from __future__ import annotations

from collections.abc import Collection

from memfit.graph.model_profile import ModelProfile, Phase
from memfit.graph.plan import Decision, Plan
from memfit.planning.known_steps import known_step


def plan_outside(profile: ModelProfile, recomputed: Collection[int]) -> Plan:
    """Return the plan that recomputes those values, and records where they are made and saved."""
    step = known_step(profile).step
    made_in = {profile.ops[step.value_op[index]].module for index in recomputed}
    saved_in = {module for index in recomputed for module in modules_saving(profile, index)}
    order = dict.fromkeys(op.module for op in profile.ops)
    recorded_in = made_in | modules_writing(profile, recomputed)
    return Plan(
        decisions={
            profile.values[index].name: Decision.RECOMPUTE if index in recomputed else Decision.SAVE
            for index in step.plannable
            if profile.ops[step.value_op[index]].module in made_in
        },
        recorded_modules=tuple(module for module in order if module is not None and module in recorded_in),
        hooked_modules=tuple(module for module in order if module is not None and module in saved_in),
        recompute_flops=sum({op: profile.ops[op].flops for op in map(step.value_op.__getitem__, recomputed)}.values()),
        fingerprint=profile.fingerprint,
        outline=step.outline,
    )


def indices_of(profile: ModelProfile, names: Collection[str]) -> frozenset[int]:
    """Return the places of the values with these names."""
    wanted = set(names)
    return frozenset(index for index, value in enumerate(profile.values) if value.name in wanted)


def modules_saving(profile: ModelProfile, index: int) -> list[str | None]:
    """Return the modules whose ops save the value; the model for a save of which that is not known."""
    return ["" if save.op_index is None else profile.ops[save.op_index].module for save in profile.values[index].saves]


def modules_writing(profile: ModelProfile, recomputed: Collection[int]) -> set[str]:
    """Return the modules in which a value is written over that is recomputed, or that a replay reads."""
    ops, values = profile.ops, profile.values
    made_by = [values[index].op_index for index in recomputed]
    touched = set(recomputed).union(*(ops[op].inputs for op in made_by if op is not None))
    return {
        op.module or ""
        for op in ops
        if op.phase is Phase.FORWARD and not touched.isdisjoint((*op.rewrites, *op.hidden_writes))
    }
