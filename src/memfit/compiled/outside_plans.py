"""Plans for trial runs of what lies outside compiled blocks: values that the eager engine may recompute, beside them.

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
from memfit.graph.plan import Plan
from memfit.planning.known_steps import known_step
from memfit.planning.partitions.outside_values import modules_saving, modules_writing, plan_outside
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
    frontier = known.exploration().frontier
    chosen = [frontier[len(frontier) // 2].recomputed, frontier[-1].recomputed]
    chosen.append(frozenset(known.step.recomputed_of(candidates)))
    return [plan_outside(profile, recomputed) for recomputed in dict.fromkeys(chosen) if recomputed]


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
        and all(is_apart(module) for module in modules_saving(profile, index))
        and all(is_apart(module) for module in modules_writing(profile, [index]))
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
