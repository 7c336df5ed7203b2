"""What the memory of a step consists of, op by op: weights, batch, optimizer state, gradients, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from memfit.graph.model_profile import ModelProfile, Phase
from memfit.graph.plan import Plan
from memfit.infeasible_budget import LiveBytes, bytes_from_before
from memfit.planning.simulate.walk import Walk
from memfit.planning.step import Step
from memfit.report.plan_effect import offloading_of, recomputed_values

MOST_SAMPLES = 40
# Naming what is live takes time for each value, so that large steps are sampled at fewer ops.
_MOST_LOOKS = 60_000
_NUM_NAMED = 4


def memory_kinds(profile: ModelProfile, at_ops: Sequence[int]) -> dict[str, Any]:
    """Return the bytes that no plan changes, by kind: what exists before the step, and what ops make and outlives it.

    Of optimizer state and gradients, these are the bytes after each of ``at_ops``.
    """
    num_ops = len(profile.ops)
    before = bytes_from_before(profile)
    made: dict[str, list[int]] = {"optimizer state": [0] * num_ops, "gradients": [0] * num_ops}
    seen = {value.storage for value in profile.values if value.op_index is None}
    for value in profile.values:
        if value.op_index is None or value.storage in seen or value.dies_after is not None:
            continue
        kind = _MADE_IN.get(profile.ops[value.op_index].phase)
        if kind is not None:
            made[kind][value.op_index] += value.num_bytes
            seen.add(value.storage)
    so_far = {kind: list(accumulate(num_bytes, initial=before[kind])) for kind, num_bytes in made.items()}
    return {
        "weights": before["weights"],
        "batch": before["batch"],
        "optimizer_state": [so_far["optimizer state"][op + 1] for op in at_ops],
        "gradients": [so_far["gradients"][op + 1] for op in at_ops],
    }


def named_samples(step: Step, plan: Plan) -> list[tuple[int, tuple[LiveBytes, ...]]]:
    """Return at some ops of the step what is live there under ``plan``, by module, the largest first."""
    num_samples = max(1, min(MOST_SAMPLES, _MOST_LOOKS // max(len(step.profile.values), 1), step.num_ops))
    if not step.num_ops:
        return []
    walk = Walk(step, recomputed_values(step, plan), offloading_of(step, plan))
    samples = []
    for number in range(num_samples):
        op_index = number * (step.num_ops - 1) // max(num_samples - 1, 1)
        samples.append((op_index, walk.live_at(int(walk.position_of_op[op_index]))[:_NUM_NAMED]))
    return samples


_MADE_IN = {Phase.BACKWARD: "gradients", Phase.OPTIMIZER: "optimizer state"}
