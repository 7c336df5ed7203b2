"""The demo's work, at a tiny size: what it measures is true, and repeats."""

from __future__ import annotations

import pytest
import torch

from memfit.demonstration.demonstrating import CHECKPOINTED, SAVED_WHOLE, Demonstration, Sizes, demonstrate
from memfit.demonstration.text import CharacterBatches, generated_text
from memfit.progress import Quiet


@pytest.fixture(scope="module")
def found() -> Demonstration:
    return demonstrate(Sizes(layers=3, width=16, heads=2, batch=4, length=16, num_training_steps=3), Quiet())


def test_five_ways_are_measured_with_equal_gradients(found: Demonstration) -> None:
    assert [way.label for way in found.ways] == [SAVED_WHOLE, *found.plans, CHECKPOINTED]
    assert len(found.plans) == 3
    assert all(way.gradients_equal for way in found.ways)


def test_peaks_are_those_of_the_profile_and_the_plans_to_the_byte(found: Demonstration) -> None:
    plain, *budgets, checkpointed = found.ways
    assert plain.peak_bytes == found.profile.peak_bytes
    predicted = [plan.predicted_peak_bytes for plan in found.plans.values()]
    assert [way.peak_bytes for way in budgets] == predicted
    assert all(plan.predicted_peak_bytes <= plan.budget_bytes for plan in found.plans.values())
    assert checkpointed.peak_bytes < plain.peak_bytes


def test_the_plain_step_is_the_measure_of_time(found: Demonstration) -> None:
    assert found.ways[0].overhead == 0.0
    assert found.ways[0].overhead_quartiles == (0.0, 0.0)
    assert all(way.step_seconds > 0 for way in found.ways)


def test_training_by_the_smallest_plan_gives_the_same_losses_to_the_last_bit(found: Demonstration) -> None:
    assert len(found.plain_losses) == 3
    assert found.planned_losses == found.plain_losses


def test_threads_and_random_numbers_are_left_as_they_were() -> None:
    num_threads, state = torch.get_num_threads(), torch.get_rng_state()
    sizes = Sizes(layers=2, width=8, heads=2, batch=2, length=8, num_training_steps=1)
    demonstrate(sizes, Quiet())
    assert torch.get_num_threads() == num_threads
    assert torch.equal(torch.get_rng_state(), state)


def test_generated_text_is_of_the_length_asked_for_and_repeats() -> None:
    text = generated_text(500)
    assert len(text) == 500
    assert text == generated_text(500) != generated_text(500, seed=1)
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz. ")


def test_batches_are_pieces_of_the_text() -> None:
    text = generated_text(300)
    batches = CharacterBatches(text, batch=5, length=20)
    ids = batches.draw(torch.Generator().manual_seed(0))
    assert ids.shape == (5, 21)
    pieces = ["".join(batches.alphabet[number] for number in row) for row in ids.tolist()]
    assert all(piece in text for piece in pieces)
