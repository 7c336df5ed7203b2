"""What the memory of a step consists of, op by op: weights, batch, optimizer state, gradients, and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from memfit.graph.model_profile import ModelProfile, Phase
from memfit.graph.plan import Plan
from memfit.infeasible_budget import bytes_from_before
from memfit.planning.simulate.walk import Walk
from memfit.planning.step import Step
from memfit.report.plan_effect import offloading_of, recomputed_values

MOST_SAMPLES = 40
# Naming what is live takes time for each value, so that large steps are sampled at fewer ops.
_MOST_LOOKS = 60_000
_NUM_NAMED = 4


@dataclass(frozen=True, slots=True)
class MemoryKinds:
    """Bytes that no plan changes: what exists before the step, and what has been made by each op and outlives it."""

    weights: int
    batch: int
    optimizer_state: list[int]
    gradients: list[int]


def memory_kinds(profile: ModelProfile) -> MemoryKinds:
    """Return what the memory of the plain step consists of besides activations."""
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
    return MemoryKinds(
        weights=before["weights"],
        batch=before["batch"],
        optimizer_state=_running_sum(before["optimizer state"], made["optimizer state"]),
        gradients=_running_sum(before["gradients"], made["gradients"]),
    )


def named_samples(step: Step, plan: Plan) -> list[tuple[int, list[tuple[str, int]]]]:
    """Return at some ops of the step what is live there under ``plan``, by module, the largest first."""
    num_samples = max(1, min(MOST_SAMPLES, _MOST_LOOKS // max(len(step.profile.values), 1), step.num_ops))
    if not step.num_ops:
        return []
    walk = Walk(step, recomputed_values(step, plan), offloading_of(step, plan))
    samples = []
    for number in range(num_samples):
        op_index = number * (step.num_ops - 1) // max(num_samples - 1, 1)
        live = walk.live_at(int(walk.position_of_op[op_index]))
        samples.append((op_index, [(entry.module, entry.num_bytes) for entry in live[:_NUM_NAMED]]))
    return samples


_MADE_IN = {Phase.BACKWARD: "gradients", Phase.OPTIMIZER: "optimizer state"}


def _running_sum(start: int, increments: list[int]) -> list[int]:
    return list(accumulate(increments, initial=start))[1:]
