"""Plans for the trial steps of calibration: they recompute much, to see what replays bit-exactly and what it costs."""

from __future__ import annotations

from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import Plan
from memfit.planning.planner import plan_recomputing
from memfit.planning.step import Step
from memfit.planning.step.block_values import BlockValues


def plan_of_all_that_replays(profile: ModelProfile) -> Plan:
    """Return the plan that recomputes each value that can be, starting anew at what leaves a block."""
    return plan_recomputing(profile, _staying_in_blocks, is_trial=True)


def plan_of_every_second_that_replays(profile: ModelProfile) -> Plan:
    """Return the plan that recomputes half of the values that can be, here and there, as plans for budgets do."""
    return plan_recomputing(
        profile, lambda step: set(sorted(step.droppable_among(_staying_in_blocks(step)))[::2]), is_trial=True
    )


def plan_of_what_leaves_blocks(profile: ModelProfile) -> Plan:
    """Return the plan that recomputes the values that leave blocks, and what those were written over, from the rest."""
    return plan_recomputing(profile, _leaving_and_rewritten, is_trial=True)


def _staying_in_blocks(step: Step) -> set[int]:
    return set(step.plannable) - BlockValues(step).leaving()


def _leaving_and_rewritten(step: Step) -> set[int]:
    wanted = BlockValues(step).leaving()
    for value in sorted(wanted, reverse=True):
        op = step.profile.ops[step.value_op[value]]
        while before := [index for index in op.rewrites if index in op.inputs and step.value_op[index] >= 0]:
            wanted.update(before)
            op = step.profile.ops[step.value_op[before[0]]]
    return wanted
