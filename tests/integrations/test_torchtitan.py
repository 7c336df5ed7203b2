"""`MemfitAC` in torchtitan's Trainer: losses as without, peaks within the budget, checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run torchtitan's Trainer in a process of its own, where torchtitan sees the CPU."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.torchtitan_on_cpu", *arguments]
    found = subprocess.run(command, env=os.environ | ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found


def train(folder: Path, budget_bytes: int, **training: Any) -> dict[str, Any]:
    return json.loads(run(str(folder), str(budget_bytes), json.dumps(training)).stdout.splitlines()[-1])


def test_the_example_runs() -> None:
    logged = run().stdout
    assert "gradients  equal" in logged
    assert "budget     within 64.0 MiB" in logged


def test_ten_steps_are_those_of_plain_training_and_within_the_budget_also_resumed(tmp_path: Path) -> None:
    # Two micro-batches in each step.
    options = {"local_batch_size": 8, "global_batch_size": 16}
    plain = train(tmp_path / "plain", 0, **options)
    budget_bytes = 9 * max(plain["peaks"]) // 10
    planned = train(tmp_path / "planned", budget_bytes, **options)
    assert len(planned["losses"]) == 10
    assert planned["losses"] == plain["losses"]
    assert planned["tokens"] == plain["tokens"]
    assert len(planned["peaks"]) == 10
    assert max(planned["peaks"]) <= budget_bytes
    shutil.rmtree(tmp_path / "planned" / "checkpoint" / "step-10")
    resumed = train(tmp_path / "planned", budget_bytes, **options)
    assert resumed["losses"] == plain["losses"][8:]
    assert resumed["tokens"] == plain["tokens"]
