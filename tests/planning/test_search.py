"""The search: low peaks against brute force and proven minimums, the lower bound, and what each proposer adds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from tests.planning.brute_force import all_judgements
from tests.planning.drawn_profiles import drawn_profiles
from tests.planning.model_families import gpt, resnet, unet

from memfit.graph.model_profile import HostCosts, ModelProfile, Phase
from memfit.planning.beam.beam_search import beam_search
from memfit.planning.bounds.lower_bound import LowerBound
from memfit.planning.candidates.launches import prune_launches
from memfit.planning.candidates.pool import Pool
from memfit.planning.search import PROPOSERS, explored
from memfit.planning.simulate.simulator import judged, simulated
from memfit.planning.step import Step


@settings(max_examples=20, deadline=None)
@given(drawn_profiles(max_forward_ops=6))
def test_the_beam_finds_plans_no_larger_than_the_plain_step_and_mostly_the_smallest(profile: ModelProfile) -> None:
    step = Step(profile)
    found = beam_search(step, step.may_be_recomputed, rates=(0.0,), rows_per_rate=64)
    peaks = [judged(step, step.recomputed_of(dropped)).peak_bytes for dropped in found]
    smallest = min(judgement.peak_bytes for judgement in all_judgements(profile))
    assert smallest <= min(peaks)


@settings(max_examples=20, deadline=None)
@given(drawn_profiles(max_forward_ops=6))
def test_no_plan_has_less_than_the_bound_on_the_peak(profile: ModelProfile) -> None:
    step = Step(profile)
    bound = LowerBound(step, step.may_be_recomputed).peak_bytes(range(step.num_ops))
    assert bound <= min(judgement.peak_bytes for judgement in all_judgements(profile))


# The minimums were proven by a dynamic program over all plans that replay each op at most once.
@pytest.mark.parametrize(
    ("profile", "least_bytes"),
    [(gpt(), 12_252_094_464), (resnet(), 2_743_448_320)],
    ids=["gpt", "resnet"],
)
def test_the_smallest_peak_of_repeated_blocks_is_found(profile: ModelProfile, least_bytes: int) -> None:
    step = Step(profile)
    found = beam_search(step, step.may_be_recomputed, rates=(0.0,), rows_per_rate=12)
    assert min(judged(step, step.recomputed_of(dropped)).peak_bytes for dropped in found) == least_bytes


def test_two_explorations_of_one_step_find_the_same() -> None:
    first, second = (explored(Step(unet(depth=3))) for _ in range(2))
    assert first.frontier == second.frontier
    assert first.least_peak_bytes == second.least_peak_bytes


def twice(profile: ModelProfile) -> ModelProfile:
    """Return a step that runs the forward and the backward pass of another one twice, as gradient accumulation does."""
    num_ops, num_values = len(profile.ops), len(profile.values)
    num_storages = 1 + max(value.storage for value in profile.values)

    def later(index: int) -> int:
        return index if profile.values[index].op_index is None else index + num_values

    ops = [
        replace(
            op,
            call=op.call + 1,
            inputs=tuple(map(later, op.inputs)),
            outputs=tuple(None if output is None else output + num_values for output in op.outputs),
            rewrites=tuple(map(later, op.rewrites)),
            hidden_writes=tuple(map(later, op.hidden_writes)),
        )
        for op in profile.ops
    ]
    values = [
        replace(
            value,
            name=f"{value.name}.again" if value.op_index is None else f"{value.name}#1",
            op_index=None if value.op_index is None else value.op_index + num_ops,
            storage=value.storage + num_storages,
            dies_after=None if value.dies_after is None else value.dies_after + num_ops,
            saves=tuple(
                replace(
                    save,
                    read_before=save.read_before + num_ops,
                    released_after=save.released_after + num_ops,
                    op_index=None if save.op_index is None else save.op_index + num_ops,
                )
                for save in value.saves
            ),
        )
        for value in profile.values
    ]
    return replace(profile, ops=(*profile.ops, *ops), values=(*profile.values, *values))


@settings(max_examples=20, deadline=None)
@given(drawn_profiles(max_forward_ops=3))
def test_steps_in_which_forward_and_backward_alternate_are_planned_as_brute_force_does(profile: ModelProfile) -> None:
    alternating = twice(profile)
    judgements = all_judgements(alternating)
    frontier = explored(Step(alternating)).frontier
    assert frontier[-1].peak_bytes == min(judgement.peak_bytes for judgement in judgements)
    for candidate in frontier:
        within = [j.recompute_seconds for j in judgements if j.peak_bytes <= candidate.peak_bytes]
        assert candidate.recompute_seconds == min(within)


def test_a_large_step_in_which_forward_and_backward_alternate_gets_plans_by_the_beam() -> None:
    step = Step(twice(resnet(depths=(1, 1, 1, 1))))
    plain = judged(step, frozenset()).peak_bytes
    found = beam_search(step, step.may_be_recomputed, rates=(0.0,), rows_per_rate=8)
    assert min(judged(step, step.recomputed_of(dropped)).peak_bytes for dropped in found) < plain


@pytest.mark.parametrize("proposer", PROPOSERS, ids=lambda proposer: proposer.__name__)
def test_every_proposer_yields_sets_of_values_that_may_be_recomputed(proposer) -> None:  # type: ignore[no-untyped-def]
    pool = Pool(Step(launch_bound(resnet(depths=(1, 1, 1, 1)))))
    pool.add_all([set(), set(pool.may_be_recomputed)])
    for wanted in proposer(pool):
        assert wanted <= set(range(len(pool.step.profile.values)))
        assert pool.add(wanted).recomputed <= pool.may_be_recomputed


def launch_bound(profile: ModelProfile) -> ModelProfile:
    """Let the host need as long as the device, and about as long again for what the engine does with each op."""
    forward = sum(op.seconds for op in profile.ops if op.phase is Phase.FORWARD)
    backward = sum(op.seconds for op in profile.ops if op.phase is not Phase.FORWARD)
    one_op = forward / sum(op.phase is Phase.FORWARD for op in profile.ops)
    host = HostCosts(
        forward=forward,
        backward=backward,
        recorded_op=0.5 * one_op,
        dropped_op=0.3 * one_op,
        module_entry=0.3 * one_op,
        hooked_save=0.2 * one_op,
        replayed_op=one_op,
        runs_ahead=True,
    )
    return replace(profile, host=host, peak_bytes=simulated(Step(profile), frozenset()).peak_bytes)


def test_values_that_do_not_matter_to_the_peak_are_saved_on_launch_bound_steps() -> None:
    pool = Pool(Step(launch_bound(resnet())))
    everything = pool.add(pool.may_be_recomputed)
    pool.add(set())
    pool.add_all(prune_launches(pool))
    at_the_peak = [plan for plan in pool.frontier() if plan.peak_bytes <= everything.peak_bytes]
    assert at_the_peak[0].added_seconds < everything.added_seconds
    assert len(at_the_peak[0].recomputed) < len(everything.recomputed)
