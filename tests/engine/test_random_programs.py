"""Random programs under random plans do, bit for bit, what they do without one."""

from __future__ import annotations

import warnings

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.engine.random_programs import INSTRUCTIONS, Instruction, build
from tests.engine.step_comparison import Trace, assert_same, trace_steps

import memfit
from memfit.layers.strategies import LayerStrategy

places = st.integers(0, 6)
instructions = st.builds(Instruction, st.sampled_from(sorted(INSTRUCTIONS)), places, places)
programs = st.lists(st.lists(instructions, min_size=1, max_size=5), min_size=2, max_size=4)
strategies = st.sampled_from([memfit.NoCheckpointing(), memfit.Full(), memfit.EveryNthLayer(2)])


def plain_trace(program: list[list[Instruction]]) -> Trace | None:
    """Return what the program does, or None where torch refuses it (it overwrote what autograd had saved)."""
    try:
        return trace_steps(build(program), num_steps=2)
    except (RuntimeError, UserWarning):
        return None


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(program=programs, strategy=strategies, data=st.data())
def test_random_program_under_random_plan_is_the_plain_one(
    program: list[list[Instruction]], strategy: LayerStrategy, data: st.DataObject
) -> None:
    expected = plain_trace(program)
    assume(expected is not None)
    model, batch, loss = build(program)
    profile = memfit.profile(model, batch, loss=loss)
    names = sorted(memfit.plan(profile, strategy=memfit.NoCheckpointing()).decisions)
    some = st.lists(st.sampled_from(names), unique=True)
    dropped = data.draw(st.just(names) | st.just([]) | some, label="values to recompute")
    step = build(program)
    with warnings.catch_warnings():
        # A plan may well drop nothing; that memfit says so is tested elsewhere.
        warnings.filterwarnings("ignore", message=".*nothing")
        plan = memfit.plan(profile, strategy=strategy, force_recompute=dropped)
        applied = memfit.apply(step[0], plan)
    with applied:
        assert_same(expected, trace_steps(step, num_steps=2))
