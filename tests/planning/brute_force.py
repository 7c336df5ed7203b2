"""Every choice there is for a small step, judged."""

from __future__ import annotations

from itertools import combinations

from memfit.graph.model_profile import ModelProfile
from memfit.planning.simulate.simulator import Judgement, judged
from memfit.planning.step import Step


def all_judgements(profile: ModelProfile) -> list[Judgement]:
    """Judge every set of plannable values, also those that make no sense."""
    step = Step(profile)
    assert len(step.plannable) <= 14
    every_set = {
        frozenset(step.recomputed_of(set(chosen)))
        for size in range(len(step.plannable) + 1)
        for chosen in combinations(step.plannable, size)
    }
    return [judged(step, recomputed) for recomputed in every_set]
