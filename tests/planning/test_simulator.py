"""The simulator against the engine's memory played object by object."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.drawn_profiles import drawn_profiles
from tests.planning.reference_engine import ReferenceEngine

from memfit.graph.model_profile import ModelProfile
from memfit.planning.offload.offloadable import held_by, may_be_offloaded
from memfit.planning.simulate.simulator import judged, simulate, simulated
from memfit.planning.step import Step
from memfit.planning.step.offload_rules import Offloading


@settings(max_examples=20, deadline=None)
@given(drawn_profiles(), st.data())
def test_simulator_agrees_with_the_engine_played_object_by_object(profile: ModelProfile, data: st.DataObject) -> None:
    step = Step(profile)
    percent = data.draw(st.sampled_from((30, 70, 100)))
    wanted = {value for value in step.plannable if data.draw(st.integers(1, 100)) <= percent}
    recomputed = step.recomputed_of(wanted)
    reference = ReferenceEngine(profile, recomputed)
    reference.run()
    simulation = simulate(profile, wanted)
    assert list(simulation.timeline_bytes) == reference.timeline
    assert simulation.peak_bytes == reference.ledger.peak_bytes
    assert list(simulation.replayed_ops) == reference.replayed
    replayed = [profile.ops[op] for op in reference.replayed]
    assert simulation.recompute_seconds == sum(
        op.seconds if op.replay_seconds is None else op.replay_seconds for op in replayed
    )
    assert simulation.recompute_flops == sum(profile.ops[op].flops for op in reference.replayed)
    assert judged(step, recomputed) == (
        simulation.peak_bytes,
        simulation.recompute_seconds,
        simulation.recompute_seconds,
    )
    if simulation.timeline_bytes[simulation.peak_op_index] == simulation.peak_bytes:
        assert sum(live.num_bytes for live in simulation.live_at_peak) == simulation.peak_bytes
    else:
        # Nothing that the step makes is as large as what was there before it.
        assert simulation.peak_bytes == Step(profile).resident_bytes


@settings(max_examples=20, deadline=None)
@given(drawn_profiles(), st.data())
def test_it_agrees_where_values_are_offloaded_too(profile: ModelProfile, data: st.DataObject) -> None:
    step = Step(profile)
    percent = data.draw(st.sampled_from((0, 30, 70)))
    recomputed = step.recomputed_of({value for value in step.plannable if data.draw(st.integers(1, 100)) <= percent})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memfit.planning.offload.offloadable.SMALLEST_OFFLOADED_BYTES", 1)
        eligible = may_be_offloaded(step)
    held = held_by(step, frozenset(recomputed), eligible)
    offloading = Offloading(
        frozenset(value for value in held if data.draw(st.booleans())), window_bytes=data.draw(st.integers(0, 60))
    )
    reference = ReferenceEngine(profile, recomputed, *offloading)
    reference.run()
    simulation = simulated(step, recomputed, offloading)
    assert list(simulation.timeline_bytes) == reference.timeline
    assert simulation.peak_bytes == reference.ledger.peak_bytes
    assert list(simulation.replayed_ops) == reference.replayed


@settings(max_examples=50, deadline=None)
@given(drawn_profiles(), st.data())
def test_what_is_recomputed_is_saved_by_autograd_or_read_by_a_replay(
    profile: ModelProfile, data: st.DataObject
) -> None:
    step = Step(profile)
    wanted = {value for value in step.plannable if data.draw(st.booleans())}
    recomputed = step.recomputed_of(wanted)
    assert recomputed == step.recomputed_of(recomputed) <= step.droppable_among(wanted)
    read = {value for index in recomputed for value in profile.ops[step.value_op[index]].inputs}
    assert all(step.saves_of_value[index] or index in read for index in recomputed)
    # Nothing is gained by dropping the others, too.
    assert judged(step, recomputed).peak_bytes <= judged(step, step.droppable_among(wanted)).peak_bytes
