"""The demo's work, at a tiny size: what it measures is true, and repeats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from memfit.cli.commands.demo_command import demo_document
from memfit.demonstration.demonstrating import Demonstration, Sizes, demonstrate
from memfit.demonstration.text import CharacterBatches, generated_text
from memfit.progress import Quiet
from memfit.verification.comparing import CHECKPOINTED, PLAIN


@pytest.fixture(scope="module")
def found() -> Demonstration:
    return demonstrate(Sizes(layers=3, width=16, heads=2, batch=4, length=16, num_training_steps=3), Quiet())


def test_five_methods_are_measured_with_equal_gradients(found: Demonstration) -> None:
    assert [result.label for result in found.methods] == [PLAIN, *found.plans, CHECKPOINTED]
    assert len(found.plans) == 3
    assert all(result.gradients_equal for result in found.methods)


def test_peaks_are_those_of_the_profile_and_the_plans_to_the_byte(found: Demonstration) -> None:
    plain, *budgets, checkpointed = found.methods
    assert plain.peak_bytes == found.profile.peak_bytes
    predicted = [plan.predicted_peak_bytes for plan in found.plans.values()]
    assert [result.peak_bytes for result in budgets] == predicted
    assert all(plan.predicted_peak_bytes <= plan.budget_bytes for plan in found.plans.values())
    assert checkpointed.peak_bytes < plain.peak_bytes


def test_the_plain_step_is_the_measure_of_time(found: Demonstration) -> None:
    assert found.methods[0].overhead == 0.0
    assert found.methods[0].overhead_quartiles == (0.0, 0.0)
    assert all(result.step_seconds > 0 for result in found.methods)


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


def test_the_document_for_machines_has_every_method(found: Demonstration, tmp_path: Path) -> None:
    document = json.loads(json.dumps(demo_document(found, [tmp_path / "page.html"])))
    assert [method["label"] for method in document["methods"]] == [PLAIN, *found.plans, CHECKPOINTED]
    assert document["plain_losses"] == document["planned_losses"] == list(found.plain_losses)
    assert document["written"] == [str(tmp_path / "page.html")]
