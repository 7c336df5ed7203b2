"""Where the engine records: the cheapest modules that contain all that a plan needs, compared with all choices."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.graph.model_profile import HostCosts, Link, ModelProfile, Phase, RecordedOp, RecordedValue, Replay, Save
from memfit.graph.names import is_within
from memfit.planning.step import Step
from memfit.planning.step.recording import RecordingChoice
from memfit.planning.step.seconds import Seconds
from memfit.planning.step.step_time import StepTime

COSTS = HostCosts(
    forward=10.0, backward=20.0, recorded_op=4.0, dropped_op=3.0, module_entry=2.0, hooked_save=2.0, replayed_op=5.0
)
MODULES = ["", "a", "a.x", "a.y", "b.x", "b.y", "b.y.z"]


def profile_of(
    modules: list[str], host: HostCosts | None = COSTS, rewriting: frozenset[int] = frozenset()
) -> ModelProfile:
    """One op in each of ``modules``, in a chain; each output is saved by the next op. ``rewriting`` ops do so."""
    num = len(modules)
    ops = [
        RecordedOp(module, "aten.sin", k, (k,), (k + 1,), (k,) if k in rewriting else (), 1, Replay.YES, seconds=1.0)
        for k, module in enumerate(modules)
    ]
    ops += [
        RecordedOp(None, "aten.cos", k, (num - k,), (), (), 1, Replay.YES, Phase.BACKWARD, seconds=2.0)
        for k in range(num)
    ]
    values = [RecordedValue("batch", 8, None, 0)]
    values += [
        RecordedValue(
            f"{module}::aten.sin#{k}",
            8,
            k,
            k + 1,
            dies_after=min(k + 1, num - 1),
            saves=(Save(2 * num - k - 1, 2 * num - k - 1, k + 1),) if k + 1 < num else (),
        )
        for k, module in enumerate(modules)
    ]
    return ModelProfile(tuple(ops), tuple(values), (), 100, 3.0 * num, "cuda:0", "f", host=host)


def cost_of_modules(chosen: tuple[str, ...], modules: list[str], inside: list[str], each: float) -> float:
    recorded = [module for module in inside if any(is_within(module, path) for path in chosen)]
    # All ops of a module are of one kind here, so that each means another run of the module. The model runs once.
    num_entries = sum(modules.count(path) if path else 1 for path in chosen)
    return COSTS.module_entry * num_entries + each * len(recorded)


def cheapest(modules: list[str], needed: set[str], inside: list[str], each: float) -> float:
    """Try all sets of modules none of which lies in another."""
    candidates = sorted({"", *modules})
    costs = []
    for size in range(len(candidates) + 1):
        for chosen in combinations(candidates, size):
            is_flat = not any(a != b and is_within(a, b) for a in chosen for b in chosen)
            if is_flat and all(any(is_within(module, path) for path in chosen) for module in needed):
                costs.append(cost_of_modules(chosen, modules, inside, each))
    return min(costs)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(MODULES), min_size=1, max_size=12), st.data())
def test_no_other_modules_cost_less(modules: list[str], data: st.DataObject) -> None:
    profile = profile_of(modules)
    values = st.integers(1, len(modules))
    recomputed = data.draw(st.frozensets(values, min_size=1))
    chosen = RecordingChoice(profile).modules_for(recomputed)
    recorded = {modules[value - 1] for value in recomputed}
    saving = modules[1:]
    watched = {modules[value] for value in recomputed if value < len(modules)}
    assert all(any(is_within(module, path) for path in chosen.recorded_modules) for module in recorded)
    assert all(any(is_within(module, path) for path in chosen.hooked_modules) for module in watched)
    of_recording = cost_of_modules(chosen.recorded_modules, modules, modules, COSTS.recorded_op)
    of_watching = cost_of_modules(chosen.hooked_modules, modules, saving, COSTS.hooked_save)
    assert of_recording == cheapest(modules, recorded, modules, COSTS.recorded_op)
    assert of_watching == cheapest(modules, watched, saving, COSTS.hooked_save)
    cost = RecordingChoice(profile).cost_of(recomputed, num_replayed=7)
    assert cost.forward == of_recording + of_watching / 2 + COSTS.dropped_op * len(recomputed)
    assert cost.backward == of_watching / 2 + COSTS.replayed_op * 7


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(MODULES), min_size=1, max_size=12), st.data())
def test_where_saves_are_skipped_ops_are_recorded_where_that_is_cheaper(
    modules: list[str], data: st.DataObject
) -> None:
    host = replace(COSTS, hooks_only_dropped_saves=True, recorded_op=0.5)
    profile = profile_of(modules, host)
    recomputed = data.draw(st.frozensets(st.integers(1, len(modules)), min_size=1))
    chosen = RecordingChoice(profile).modules_for(recomputed)
    recorded = {modules[value - 1] for value in recomputed}
    watched = {modules[value] for value in recomputed if value < len(modules)}
    for module in watched:
        num_else = modules[1:].count(module) - sum(modules[v] == module for v in recomputed if v < len(modules))
        if num_else * host.hooked_save > modules.count(module) * host.recorded_op:
            recorded.add(module)
    assert all(any(is_within(module, path) for path in chosen.recorded_modules) for module in recorded)
    assert all(any(is_within(module, path) for path in chosen.hooked_modules) for module in watched)
    assert not any(a != b and is_within(a, b) for a in chosen.hooked_modules for b in chosen.hooked_modules)
    of_recording = cost_of_modules(chosen.recorded_modules, modules, modules, host.recorded_op)
    assert of_recording == cheapest(modules, recorded, modules, host.recorded_op)
    # Each value is saved once, between the op that makes it and the next, and nothing else is saved there.
    of_watching = host.hooked_save * len({value for value in recomputed if value < len(modules)})
    cost = RecordingChoice(profile).cost_of(recomputed, num_replayed=7)
    assert cost.forward == of_recording + of_watching / 2 + host.dropped_op * len(recomputed)
    assert cost.backward == of_watching / 2 + host.replayed_op * 7


def test_what_is_saved_at_the_same_moment_is_watched_too() -> None:
    host = replace(COSTS, hooks_only_dropped_saves=True, recorded_op=0.0, dropped_op=0.0, module_entry=0.0)
    profile = profile_of(["a", "b", "c"], host)
    batch, first, *others = profile.values
    # The op in "b" saves the batch, too, and what it makes.
    batch, first = replace(batch, saves=first.saves), replace(first, saves=(*first.saves, *first.saves))
    profile = replace(profile, values=(batch, first, *others))
    assert RecordingChoice(profile).cost_of({1}, 0).forward == COSTS.hooked_save * 3 / 2
    assert RecordingChoice(profile).cost_of({2}, 0).forward == COSTS.hooked_save / 2


def test_a_write_over_what_a_replay_starts_from_is_recorded() -> None:
    modules = ["a", "b", "c"]
    assert RecordingChoice(profile_of(modules)).modules_for({2}).recorded_modules == ("b",)
    # What "a" made is what the replay of "b" starts from, and "c" writes over what "b" made.
    assert RecordingChoice(profile_of(modules, rewriting=frozenset({2}))).modules_for({2}).recorded_modules == (
        "b",
        "c",
    )


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        # The device computes for 4 and 8 seconds. Two recorded, watched and dropped ops cost the host 2 * (2 + 4) +
        # 2 * (2 + 2) / 2 + 2 * 3 = 22 seconds in the forward pass and 4 + 2 * 5 = 14 in the backward pass.
        (0.0, 0.0, 22.0 + 14.0 - 12.0),  # the host is what takes long: 36 seconds instead of 12
        (1.0, 9.0, 23.0 + 23.0 - 12.0),
        (20.0, 0.0, 42.0 + 14.0 - 28.0),  # the plain step waited for its forward pass already
        (30.0, 30.0, 22.0 + 14.0),  # and here all the time
    ],
)
def test_added_seconds_by_hand(forward: float, backward: float, expected: float) -> None:
    host = HostCosts(forward, backward, 4.0, 3.0, 2.0, 2.0, 5.0)
    profile = profile_of(["a", "b", "c", "d"], host)
    step_time = StepTime(profile, RecordingChoice(profile))
    assert step_time.launches_may_matter
    assert step_time.added({1, 2}, num_runs=2, replay_seconds=2.0) == expected


def test_a_host_that_offloads_spends_its_time_on_that_too() -> None:
    profile = profile_of(["a", "b", "c", "d"], HostCosts(30.0, 30.0, 4.0, 3.0, 2.0, 2.0, 5.0))
    linked = replace(profile, link=Link(1.0, 1.0, 0.0, 0, host_seconds=6.0))
    step_time = StepTime(linked, RecordingChoice(linked))
    # As above, and two values at six seconds; without the link, nobody knows.
    assert step_time.added({1, 2}, num_runs=2, replay_seconds=2.0, num_offloaded=2) == 22.0 + 14.0 + 12.0
    step_time = StepTime(profile, RecordingChoice(profile))
    assert step_time.added({1, 2}, num_runs=2, replay_seconds=2.0, num_offloaded=2) == 22.0 + 14.0


@pytest.mark.parametrize(
    ("waiting", "runs_ahead", "expected"),
    [
        (Seconds(10.0, 10.0), True, 0.0),  # the host takes 36 seconds anyway, and the device 14
        (Seconds(20.0, 10.0), True, 4.0 + 20.0 + 10.0 + 10.0 - 36.0),
        (Seconds(10.0, 10.0), False, 22.0 + 10.0 + 10.0 - 36.0),  # once the forward pass is launched
        (Seconds(10.0, 0.0), False, 0.0),
    ],
)
def test_the_host_goes_on_while_the_device_waits_for_copies(
    waiting: Seconds, runs_ahead: bool, expected: float
) -> None:
    # As above: 22 seconds in the forward pass and 14 after it, and the device computes for 4, and for 8 and 2.
    profile = profile_of(["a", "b", "c", "d"], HostCosts(0.0, 0.0, 4.0, 3.0, 2.0, 2.0, 5.0, runs_ahead=runs_ahead))
    step_time = StepTime(profile, RecordingChoice(profile))
    without = step_time.added({1, 2}, num_runs=2, replay_seconds=2.0)
    assert without == 36.0 - 12.0
    assert step_time.added({1, 2}, num_runs=2, replay_seconds=2.0, waiting=waiting) == without + expected


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (20.0, 42.0 + 14.0 - 20.0),  # the plain step takes as long as it takes to launch, not 20 + 8
        (0.0, 22.0 + 14.0 - 12.0),
    ],
)
def test_a_host_that_runs_ahead_does_not_keep_the_device_waiting_for_the_forward_pass(
    forward: float, expected: float
) -> None:
    host = HostCosts(forward, 0.0, 4.0, 3.0, 2.0, 2.0, 5.0, runs_ahead=True)
    profile = profile_of(["a", "b", "c", "d"], host)
    assert StepTime(profile, RecordingChoice(profile)).added({1, 2}, num_runs=2, replay_seconds=2.0) == expected


def test_a_device_that_never_waits_is_slowed_by_replays_alone() -> None:
    for host in (None, HostCosts(0.1, 0.1, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3)):
        profile = profile_of(["a", "b", "c", "d"], host)
        step_time = StepTime(profile, RecordingChoice(profile))
        assert not step_time.launches_may_matter
        assert step_time.added({1, 2}, num_runs=2, replay_seconds=2.0) == 2.0
        assert step_time.added({1, 2}, num_runs=2, replay_seconds=2.0, waiting=Seconds(3.0, 4.0)) == 9.0
        assert step_time.at_least(2.0) == 2.0


def test_in_a_cuda_graph_plans_add_their_replays_alone() -> None:
    profile = profile_of(["a", "b", "c", "d"], HostCosts(30.0, 30.0, 4.0, 3.0, 2.0, 2.0, 5.0))
    captured = profile.for_cuda_graph()
    step_time = StepTime(captured, RecordingChoice(captured))
    assert not step_time.launches_may_matter
    assert step_time.added({1, 2}, num_runs=2, replay_seconds=2.0) == 2.0
    # Its buffers come from the same allocator.
    assert Step(captured).has_met_allocator
    without_host = profile_of(["a"], None)
    assert without_host.for_cuda_graph() is without_host


def test_replays_that_fit_into_the_wait_for_launches_add_nothing() -> None:
    profile = profile_of(["a", "b"], HostCosts(30.0, 30.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    step_time = StepTime(profile, RecordingChoice(profile))
    assert step_time.added({1}, num_runs=1, replay_seconds=1.0) == 0.0
    # The forward pass takes 30 seconds to launch, so that the backward pass may take 30 on the device, not 4.
    assert step_time.added({1}, num_runs=1, replay_seconds=27.0) == 1.0
