"""Plans for what lies outside compiled blocks: values that the eager engine may recompute, in the same step.

Candidates are values that a module made and modules saved which neither lie in a compiled block nor contain one: those
of a stem, a norm, the head. The engine then records in those modules only, and never meets compiled code. The planner
says which of them to recompute, for the same step in which blocks take no memory. Beside its smallest plan, all that
can be recomputed is a choice, because with compiled blocks the peak may be elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from memfit.graph.model_profile import ModelProfile, Phase, Replay
from memfit.graph.names import is_within
from memfit.graph.plan import Decision, Plan
from memfit.planning.candidates.pool import Candidate
from memfit.planning.known_steps import known_step
from memfit.planning.step import Step

# Less than this share of the plain peak is not worth the trial runs.
_SMALLEST_SHARE = 0.01


def plans_outside(profile: ModelProfile, blocks: Sequence[str]) -> list[Plan]:
    """Return a few plans that recompute values outside the compiled ``blocks``, and nothing else."""
    candidates = _candidates(profile, blocks)
    num_bytes = sum(profile.values[index].num_bytes for index in candidates if profile.values[index].is_saved)
    if num_bytes < _SMALLEST_SHARE * profile.peak_bytes:
        return []
    alone = _without_blocks(profile, blocks, candidates)
    known = known_step(alone)
    frontier: tuple[Candidate, ...] = known.exploration().frontier
    chosen = [frontier[len(frontier) // 2].recomputed, frontier[-1].recomputed]
    chosen.append(frozenset(known.step.recomputed_of(candidates)))
    return [plan_outside(profile, recomputed) for recomputed in dict.fromkeys(chosen) if recomputed]


def plan_outside(profile: ModelProfile, recomputed: Collection[int]) -> Plan:
    """Return the plan that recomputes those values, and records where they are made and saved."""
    step = known_step(profile).step
    made_in = {profile.ops[step.value_op[index]].module for index in recomputed}
    saved_in = {module for index in recomputed for module in _saved_in(profile, index)}
    order = dict.fromkeys(op.module for op in profile.ops)
    recorded = [module for module in order if module is not None and module in made_in | _writers(profile, recomputed)]
    return Plan(
        decisions={
            profile.values[index].name: Decision.RECOMPUTE if index in recomputed else Decision.SAVE
            for index in step.plannable
            if profile.ops[step.value_op[index]].module in made_in
        },
        recorded_modules=tuple(recorded),
        hooked_modules=tuple(module for module in order if module is not None and module in saved_in),
        recompute_flops=sum({op: profile.ops[op].flops for op in map(step.value_op.__getitem__, recomputed)}.values()),
        fingerprint=profile.fingerprint,
        outline=step.outline,
    )


def indices_of(profile: ModelProfile, names: Collection[str]) -> frozenset[int]:
    """Return the places of the values with these names."""
    wanted = set(names)
    return frozenset(index for index, value in enumerate(profile.values) if value.name in wanted)


def _candidates(profile: ModelProfile, blocks: Sequence[str]) -> set[int]:
    called = {call.path for call in profile.module_calls}

    def is_apart(module: str | None) -> bool:
        return (
            bool(module)
            and module is not None
            and (not called or module in called)
            and not any(is_within(module, block) or is_within(block, module) for block in blocks)
        )

    step = Step(profile)
    return {
        index
        for index in step.may_be_recomputed
        if is_apart(profile.ops[step.value_op[index]].module)
        and all(is_apart(module) for module in _saved_in(profile, index))
        and all(is_apart(module) for module in _writers(profile, [index]))
    }


def _saved_in(profile: ModelProfile, index: int) -> list[str | None]:
    """Return the modules whose ops save the value; the model for a save of which that is not known."""
    return ["" if save.op_index is None else profile.ops[save.op_index].module for save in profile.values[index].saves]


def _writers(profile: ModelProfile, recomputed: Collection[int]) -> set[str]:
    """Return the modules in which a value is written over that is recomputed, or that a replay reads."""
    ops, values = profile.ops, profile.values
    made_by = [values[index].op_index for index in recomputed]
    touched = set(recomputed).union(*(ops[op].inputs for op in made_by if op is not None))
    return {
        op.module or ""
        for op in ops
        if op.phase is Phase.FORWARD and not touched.isdisjoint((*op.rewrites, *op.hidden_writes))
    }


def _without_blocks(profile: ModelProfile, blocks: Sequence[str], candidates: Collection[int]) -> ModelProfile:
    """Return the step in which blocks take no memory, and nothing but the ``candidates`` can be recomputed."""

    def is_inside(module: str | None) -> bool:
        return module is not None and any(is_within(module, block) for block in blocks)

    inside = {
        output
        for op in profile.ops
        if op.phase is Phase.FORWARD and is_inside(op.module)
        for output in op.outputs
        if output is not None
    }
    values = tuple(
        replace(
            value,
            num_bytes=0 if index in inside else value.num_bytes,
            replays_exactly=value.replays_exactly and index in candidates,
        )
        for index, value in enumerate(profile.values)
    )
    ops = tuple(
        replace(op, workspace_bytes=0, replay=Replay.NO_GRAD) if is_inside(op.module) else op for op in profile.ops
    )
    return replace(profile, ops=ops, values=values, compiled=None)
