"""What ``memfit demo`` prints and writes, at a tiny size: a table, words and a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit import ModelProfile, Plan
from memfit.cli.commands.demo_command import show_demo
from memfit.demonstration.demonstrating import Sizes


def test_the_demo_shows_what_was_won_and_writes_the_page_into_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Wide enough for each row of the table to be one line.
    monkeypatch.setenv("COLUMNS", "120")
    folder = tmp_path / "memfit-demo"
    sizes = Sizes(layers=4, width=16, heads=2, batch=4, length=16, num_training_steps=2)
    show_demo(sizes, folder, as_json=False)
    shown, errors = capsys.readouterr()
    assert [line.removeprefix("memfit: ") for line in errors.splitlines()] == [
        "profiling the plain step",
        "planning",
        "comparing methods",
        "timing",
        "training, plain and planned",
    ]
    rows = [line for line in shown.splitlines() if line.rstrip().endswith("equal") and "%" in line]
    assert len(rows) == 5
    assert "plain step" in rows[0]
    assert all("memfit at " in row for row in rows[1:4])
    assert "torch: checkpoint every block" in rows[4]
    words = " ".join(shown.split())
    assert "All gradients are those of the plain step, bit for bit." in words
    assert "the smallest plan gives the same loss at every step, to the last bit." in words
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "torch: checkpoint every block" in page
    plan, profile = Plan.load(folder / "plan.json"), ModelProfile.load(folder / "profile.json")
    assert plan.fingerprint == profile.fingerprint
    assert plan.predicted_peak_bytes < profile.peak_bytes
