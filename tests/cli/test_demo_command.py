"""``memfit demo`` as a newcomer runs it: one command, under 90 seconds, a table, words and a page."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from tests.cli.running import without_stages

from memfit import ModelProfile, Plan

SCRIPT = [sys.executable, "-c", "from memfit.cli.main import run; run()", "demo"]
MOST_SECONDS = 90


def test_the_demo_shows_what_was_won_and_writes_the_page_into_its_folder(tmp_path: Path) -> None:
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Wide enough for each row of the table to be one line.
    wide = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(SCRIPT, cwd=tmp_path, env=wide, capture_output=True, text=True, check=True)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor, so that other work on this machine does not count.
    assert end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime < MOST_SECONDS
    assert without_stages(done.stderr) == ""
    rows = [line for line in done.stdout.splitlines() if line.rstrip().endswith("equal") and "%" in line]
    assert len(rows) == 5
    assert "plain step" in rows[0]
    assert all("memfit at " in row for row in rows[1:4])
    assert "torch: checkpoint every block" in rows[4]
    words = " ".join(done.stdout.split())
    assert "All gradients are those of the plain step, bit for bit." in words
    assert "the smallest plan gives the same loss at every step, to the last bit." in words
    folder = tmp_path / "memfit-demo"
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "torch: checkpoint every block" in page
    plan, profile = Plan.load(folder / "plan.json"), ModelProfile.load(folder / "profile.json")
    assert plan.fingerprint == profile.fingerprint
    assert plan.predicted_peak_bytes < 0.5 * profile.peak_bytes
