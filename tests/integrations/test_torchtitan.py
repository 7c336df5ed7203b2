"""`MemfitAC` in torchtitan's Trainer: losses as without, peaks within the budget, checkpoints.

torchtitan needs triton, of 1 GB, and is none of the packages that the development extra installs.
"""

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


def train(folder: Path, budget_bytes: int, **training: Any) -> dict[str, Any]:
    """Train in a process of its own, where torchtitan sees the CPU."""
    script = "tests.integrations.torchtitan_on_cpu"
    command = [sys.executable, "-W", "ignore", "-m", script, str(folder), str(budget_bytes), json.dumps(training)]
    found = subprocess.run(command, env=os.environ | ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
def test_ten_steps_are_those_of_plain_training_and_within_the_budget_also_resumed(tmp_path: Path) -> None:
    # Two micro-batches in each step.
    options = {"local_batch_size": 8, "global_batch_size": 16}
    plain = train(tmp_path / "plain", 0, **options)
    budget_bytes = 9 * max(plain["peaks"]) // 10
    planned = train(tmp_path / "planned", budget_bytes, **options)
    assert len(planned["losses"]) == 10
    assert planned["losses"] == plain["losses"]
    assert planned["tokens"] == plain["tokens"]
    assert max(planned["peaks"]) <= budget_bytes
    shutil.rmtree(tmp_path / "planned" / "checkpoint" / "step-10")
    resumed = train(tmp_path / "planned", budget_bytes, **options)
    assert resumed["losses"] == plain["losses"][8:]
    assert resumed["tokens"] == plain["tokens"]
