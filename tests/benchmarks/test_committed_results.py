"""The committed results of the frontier: those that are shown are as good as is said, and none is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from frontier_compiled import BUDGETS
from frontier_marks import marks_of, points_in_words
from frontier_models import SUBJECTS
from frontier_results import ModelResult, load
from frontier_runs import BEGIN, END, all_runs
from frontier_runs import markdown as markdown_of_runs
from frontier_tables import markdown, replaced

ROOT = Path(__file__).parents[2]
# A run that is to be shown and misses a mark is named here, not left out for a better one.
KNOWN_TO_BE_MISSED: set[tuple[str, str]] = set()
_LONGEST_SECONDS = 240
_FEWEST_PLANS = 8


@pytest.fixture(scope="module")
def models() -> list[ModelResult]:
    return load(sorted((ROOT / "benchmarks/results/frontier-h200").glob("*.json")))


def test_the_page_shows_them(models: list[ModelResult]) -> None:
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert replaced(page, markdown(models, ROOT / "docs/images")) == page


def test_the_page_lists_all_runs_that_are_kept() -> None:
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    runs = all_runs()
    assert replaced(page, markdown_of_runs(runs), BEGIN, END) == page
    for uses_host_memory in (False, True):
        shown = [run for run in runs if run.is_shown and run.uses_host_memory is uses_host_memory]
        assert sorted(run.model.name for run in shown) == sorted(SUBJECTS)


def test_of_the_runs_that_say_when_they_were_the_newest_is_shown() -> None:
    """None is chosen for what it reads."""
    dated = [run for run in all_runs() if run.model.measured_at is not None]
    assert dated
    for kind in {(run.model.name, run.uses_host_memory) for run in dated}:
        of_kind = [run for run in dated if (run.model.name, run.uses_host_memory) == kind]
        assert max(of_kind, key=lambda run: run.model.measured_at or "").is_shown, kind


def test_all_models_are_there_and_what_they_miss_is_known(models: list[ModelResult]) -> None:
    assert sorted(model.name for model in models) == sorted(SUBJECTS)
    missed = {(model.name, mark.name) for model in models for mark in marks_of(model) if mark.is_met is False}
    assert missed == KNOWN_TO_BE_MISSED
    judged = {mark.name for model in models for mark in marks_of(model) if mark.is_met}
    assert judged == {mark.name for mark in marks_of(models[0])}


def test_each_was_compiled_at_every_budget(models: list[ModelResult]) -> None:
    ways = ["plain", *(f"torch.compile at a budget of {budget}" for budget in BUDGETS), "plain again"]
    for model in models:
        assert [row.way for row in model.compiled.values() if row.is_measured] == ways, model.name


def test_each_has_plans_enough_and_took_no_longer_than_it_may(models: list[ModelResult]) -> None:
    for model in models:
        assert len(model.memfit_rows()) >= _FEWEST_PLANS, model.name
        assert model.facts["seconds"]["all"] <= _LONGEST_SECONDS, model.name


def test_the_readme_counts_their_points(models: list[ModelResult]) -> None:
    assert points_in_words(models) == "At 52 peaks of ways that recompute: faster at 47, as fast at 5."
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "faster at 47 of 52 such points, as fast within the spread at 5, slower at none" in readme
