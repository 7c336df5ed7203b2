"""Forced values: which selectors have no effect, and what is told of them; which names are offered for a wrong one."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
from tests.planning.model_families import gpt

from memfit.errors import InvalidParameterError
from memfit.graph.model_profile import ModelProfile, Replay
from memfit.graph.plan import Decision
from memfit.layers.strategies import NoCheckpointing
from memfit.planning.planner import plan


def gpt_with(op_name: str, *, replay: Replay = Replay.YES, replays_exactly: bool = True) -> ModelProfile:
    """Return a small GPT in which the ops of one name are as told."""
    profile = gpt(2)
    ops = tuple(replace(op, replay=replay) if op.op == op_name else op for op in profile.ops)
    values = tuple(
        replace(value, replays_exactly=replays_exactly)
        if value.op_index is not None and ops[value.op_index].op == op_name
        else value
        for value in profile.values
    )
    return replace(profile, ops=ops, values=values)


@pytest.mark.parametrize(
    ("profile", "selector", "told"),
    [
        (
            gpt(2),
            "blocks.0.norm1::aten.native_layer_norm#0.1",
            r"'blocks\.0\.norm1::aten\.native_layer_norm#0\.1' is saved whatever is planned \(a small statistic that "
            r"aten\.native_layer_norm returns beside its result\)",
        ),
        (
            gpt_with("aten.gelu", replay=Replay.STATEFUL),
            "*::aten.gelu",
            r"'blocks\.0\S*::aten\.gelu#0' and 1 more are saved whatever is planned \(aten\.gelu "
            r"cannot be replayed: not a function of its inputs\)",
        ),
        (
            gpt_with("aten.gelu", replays_exactly=False),
            "blocks.1.*::aten.gelu",
            r"'blocks\.1\.mlp::aten\.gelu#0' is saved whatever is planned \(aten\.gelu did not replay bit-exactly in "
            r"a trial step\)",
        ),
    ],
)
def test_a_selector_without_effect_is_warned_of_with_the_reason(
    profile: ModelProfile, selector: str, told: str
) -> None:
    with pytest.warns(UserWarning, match=rf"changes nothing: {told}\. Leave it out") as caught:
        made = plan(profile, strategy=NoCheckpointing(), force_recompute=[selector])
    assert set(made.decisions.values()) == {Decision.SAVE}
    assert [warning.filename for warning in caught] == [__file__]


def test_a_selector_that_also_names_what_is_saved_anyway_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = plan(gpt(2), strategy=NoCheckpointing(), force_recompute=["blocks.0.norm1"])
    recomputed = [name for name, decision in made.decisions.items() if decision is Decision.RECOMPUTE]
    assert recomputed == ["blocks.0.norm1::aten.native_layer_norm#0"]


@pytest.mark.parametrize("argument", ["force_save", "force_recompute"])
@pytest.mark.parametrize("selectors", [None, 3, "blocks.0"])
def test_selectors_that_are_no_list_are_told_with_the_argument(argument: str, selectors: object) -> None:
    with pytest.raises(InvalidParameterError, match=rf"{argument} is a list of selectors.* got .*{selectors}"):
        plan(gpt(2), strategy=NoCheckpointing(), **{argument: selectors})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("selector", "nearest"),
    [
        ("nope", "'norm"),
        ("BLOCKS.0", "'blocks.0', "),
        ("blocks.9", "'blocks."),
        ("blocks.*::aten.gelo", "::aten.gelu'"),
    ],
)
def test_a_selector_that_matches_nothing_is_always_told_the_nearest(selector: str, nearest: str) -> None:
    with pytest.raises(InvalidParameterError) as raised:
        plan(gpt(2), strategy=NoCheckpointing(), force_save=[selector])
    _, _, offered = str(raised.value).partition("; the nearest are ")
    assert nearest in offered
