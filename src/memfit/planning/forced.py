"""Values that users force to be saved or recomputed, whatever is planned."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memfit.errors import InvalidParameterError
from memfit.graph.model_profile import Replay
from memfit.graph.names import ValueName, parse_value_name
from memfit.graph.selectors import select
from memfit.planning.step import Step
from memfit.planning.step.block_values import is_statistic
from memfit.validation import shown


class Forced(NamedTuple):
    """The indices of values to be saved, and of those to be recomputed where both do not name them."""

    saved: frozenset[int]
    recomputed: frozenset[int]


NOTHING_FORCED = Forced(frozenset(), frozenset())


def forced_values(step: Step, force_save: Iterable[str], force_recompute: Iterable[str]) -> Forced:
    """Return what the selectors name; one that can have no effect is warned of, with the reason."""
    names: dict[ValueName, int] = {parse_value_name(step.profile.values[index].name): index for index in step.plannable}
    saved: set[int] = set()
    recomputed: set[int] = set()
    for selector in _selectors("force_recompute", force_recompute):
        chosen = [names[name] for name in select(selector, names)]
        if all(_why_saved(step, index) is not None for index in chosen):
            reasons = "; ".join(dict.fromkeys(f"{_why_saved(step, index)}" for index in chosen))
            first = step.profile.values[chosen[0]].name
            others = f" and {len(chosen) - 1} more are" if len(chosen) > 1 else " is"
            warnings.warn(
                f"force_recompute {selector!r} changes nothing: {first!r}{others} saved whatever is planned "
                f"({reasons}). Leave it out, or name other values",
                stacklevel=3,
            )
        recomputed.update(index for index in chosen if not is_statistic(step, index))
    for selector in _selectors("force_save", force_save):
        saved.update(names[name] for name in select(selector, names))
    return Forced(frozenset(saved), frozenset(recomputed))


def _why_saved(step: Step, index: int) -> str | None:
    """Return why the value is never recomputed; None where it can be."""
    op, value = step.profile.ops[step.value_op[index]], step.profile.values[index]
    if is_statistic(step, index):
        return f"a small statistic that {op.op} returns beside its result"
    if index in step.may_be_recomputed:
        return None
    if op.replay is not Replay.YES:
        return f"{op.op} cannot be replayed: {op.replay}"
    if not value.replays_exactly:
        return f"{op.op} did not replay bit-exactly in a trial step"
    if index in step.passes.values_read_later(step.profile):
        return "a later forward pass reads it"
    return f"{op.op} shares its storage with values that are written apart"


def _selectors(argument: str, selectors: Iterable[str]) -> Sequence[str]:
    if isinstance(selectors, str):
        raise InvalidParameterError(
            f"{argument} is a list of selectors, got the text {selectors!r}; write [{selectors!r}]"
        )
    if not isinstance(selectors, Iterable):
        raise InvalidParameterError(
            f"{argument} is a list of selectors such as ['layers.*.mlp::aten.silu'], or () for none; "
            f"got {shown(selectors)}"
        )
    return tuple(selectors)
