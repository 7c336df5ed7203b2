"""Where the layer strategies land on a model's trade-off, by the same judge as every plan."""

from __future__ import annotations

from memfit.graph.model_profile import ModelProfile
from memfit.layers.strategies import AttentionOnly, EveryNthLayer, FfnOnly, Full, LayerStrategy, SqrtLayers
from memfit.planning.planner import plan
from memfit.planning.simulator import simulated
from memfit.planning.step import Step
from memfit.report.page_data import Mark
from memfit.report.plan_effect import recomputed_values

# Of strategies that choose the same blocks the first gives the name: attention is in every block of most transformers.
_STRATEGIES: dict[str, LayerStrategy] = {
    "every block (full)": Full(),
    "every 4th block": EveryNthLayer(4),
    "every 2nd block": EveryNthLayer(2),
    "√n blocks": SqrtLayers(),
    "attention blocks": AttentionOnly(),
    "feed-forward blocks": FfnOnly(),
}


def strategy_marks(profile: ModelProfile) -> tuple[Mark, ...]:
    """Return a mark for each layer strategy that changes something, and one for saving everything."""
    step = Step(profile)
    marks = [Mark("save everything", simulated(step, set()).peak_bytes, 0.0)]
    seen: set[frozenset[int]] = {frozenset()}
    for label, strategy in _STRATEGIES.items() if profile.blocks else ():
        recomputed = recomputed_values(step, plan(profile, strategy=strategy))
        if recomputed not in seen:
            seen.add(recomputed)
            simulation = simulated(step, recomputed)
            overhead = simulation.added_seconds / profile.step_seconds if profile.step_seconds else 0.0
            marks.append(Mark(label, simulation.peak_bytes, overhead))
    return tuple(marks)
