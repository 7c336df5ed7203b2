"""``memfit demo`` as a newcomer runs it: one command, under 90 seconds, a table, words and a page."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from memfit import ModelProfile, Plan

SCRIPT = [sys.executable, "-c", "from memfit.cli.main import run; run()", "demo"]
MOST_SECONDS = 90


def test_the_demo_shows_what_was_won_and_writes_the_page_into_its_folder(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = subprocess.run(SCRIPT, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert time.monotonic() - begin < MOST_SECONDS
    assert done.stderr == ""
    rows = [line for line in done.stdout.splitlines() if line.rstrip().endswith("equal")]
    assert len(rows) == 5
    assert "saved whole" in rows[0]
    assert all("memfit at " in row for row in rows[1:4])
    assert "torch.utils.checkpoint" in rows[4]
    words = " ".join(done.stdout.split())
    assert "All gradients are those of the plain step, bit for bit." in words
    assert "the smallest plan gives the same loss at every step, to the last bit." in words
    folder = tmp_path / "memfit-demo"
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "torch.utils.checkpoint" in page
    plan, profile = Plan.load(folder / "plan.json"), ModelProfile.load(folder / "profile.json")
    assert plan.fingerprint == profile.fingerprint
    assert plan.predicted_peak_bytes < 0.5 * profile.peak_bytes


def test_the_demo_as_json_has_every_way(tmp_path: Path) -> None:
    done = subprocess.run(
        [*SCRIPT, "--json", "--out", "here"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    document = json.loads(done.stdout)
    assert len(document["ways"]) == 5
    assert document["plain_losses"] == document["planned_losses"]
    assert document["plain_losses"][-1] < document["plain_losses"][0]
    assert document["written"] == ["here/page.html", "here/profile.json", "here/plan.json"]
    assert all((tmp_path / path).is_file() for path in document["written"])
