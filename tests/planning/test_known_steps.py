"""One exploration for each profile object, and none that outlives it."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.planning.model_families import chain, gpt

from memfit.planning import known_steps
from memfit.planning.known_steps import known_step
from memfit.planning.planner import frontier, plan
from memfit.planning.simulate.walk import Walk


@pytest.fixture
def num_walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count every walk over a step, whoever asks for it."""
    counted = [0]
    walk = Walk.__init__

    def counting(self: Walk, *arguments: object) -> None:
        counted[0] += 1
        walk(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Walk, "__init__", counting)
    return counted


def test_a_second_call_simulates_nothing(num_walks: list[int]) -> None:
    profile = gpt(2)
    points = frontier(profile, points=6)
    budget = points[3].peak_bytes
    made = plan(profile, budget=budget)
    num_before = num_walks[0]
    assert num_before > 0
    assert plan(profile, budget=budget) == made
    assert frontier(profile, points=6) == points
    assert num_walks[0] == num_before


def test_other_budgets_share_the_exploration(num_walks: list[int]) -> None:
    profile = gpt(2)
    points = frontier(profile, points=6)
    num_before = num_walks[0]
    for point in points:
        plan(profile, budget=point.peak_bytes + 1)
    # At most the plan itself and the next faster one, where the frontier has not looked at them yet.
    assert num_walks[0] - num_before <= 2 * len(points)


def test_the_same_selectors_share_one_exploration_and_others_do_not(num_walks: list[int]) -> None:
    profile = gpt(4)
    points = frontier(profile)
    budget = (points[0].peak_bytes + points[-1].peak_bytes) // 2
    saved = plan(profile, budget=budget, force_save=["*::aten.gelu"])
    num_before = num_walks[0]
    assert plan(profile, budget=budget, force_save=["*::aten.gelu"]) == saved
    assert num_walks[0] == num_before
    assert plan(profile, budget=budget, force_save=["*.norm1"]) != saved
    assert num_walks[0] > num_before


def test_equal_profiles_are_known_apart() -> None:
    profile = gpt(2)
    twin = replace(profile)
    assert twin == profile
    assert known_step(twin) is not known_step(profile)
    assert known_step(profile) is known_step(profile)


def test_what_is_known_goes_with_the_profile() -> None:
    gc.collect()
    num_before = len(known_steps._known)
    profile = gpt(2)
    budget = frontier(profile)[-1].peak_bytes
    known = weakref.ref(known_step(profile))
    assert len(known_steps._known) == num_before + 1
    del profile
    gc.collect()
    assert known() is None
    assert len(known_steps._known) == num_before
    # Another profile, perhaps at the same address, is planned for itself.
    assert frontier(chain(3))[0].peak_bytes < budget


def test_threads_share_one_exploration(num_walks: list[int]) -> None:
    alone = gpt(2)
    frontier(alone, points=4)
    num_alone, num_walks[0] = num_walks[0], 0
    profile = gpt(2)
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: frontier(profile, points=4), range(8)))
    assert all(result == results[0] for result in results)
    assert num_walks[0] == num_alone
