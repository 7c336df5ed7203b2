"""The layer strategies as baselines on a model's frontier, predicted as every plan is."""

from __future__ import annotations

from memfit.graph.model_profile import ModelProfile
from memfit.layers.strategies import (
    AttentionOnly,
    EveryNthLayer,
    FfnOnly,
    Full,
    LayerStrategy,
    NoCheckpointing,
    SqrtLayers,
)
from memfit.planning.planner import plan
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
    """Return a mark for each layer strategy that changes something, and one for saving everything.

    Of a step with compiled blocks, layer strategies choose nothing: its mark is the plain step, which was measured.
    """
    if profile.compiled is not None and profile.compiled.kinds:
        return (Mark("plain step, not compiled", profile.peak_bytes, 0.0, is_measured=True),)
    step = Step(profile)
    marks = [Mark("save everything", plan(profile, strategy=NoCheckpointing()).predicted_peak_bytes, 0.0)]
    seen: set[frozenset[int]] = {frozenset()}
    for label, strategy in _STRATEGIES.items() if profile.blocks else ():
        chosen = plan(profile, strategy=strategy)
        recomputed = recomputed_values(step, chosen)
        if recomputed not in seen:
            seen.add(recomputed)
            marks.append(Mark(label, chosen.predicted_peak_bytes, chosen.predicted_overhead))
    return tuple(marks)
