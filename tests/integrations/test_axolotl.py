"""`MemfitPlugin` in axolotl, run as its users do, on the configuration of the example with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("axolotl")

import yaml
from examples.trl_trainers import model, text, tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "axolotl.yml"
OFFLINE = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "ACCELERATE_USE_CPU": "true"}


def train(folder: Path, **options: Any) -> tuple[str, list[float], list[int]]:
    """Train in a process of its own, since axolotl changes functions of transformers.

    Return the output, the losses, and the peaks of the steps.
    """
    config = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8")) | options
    config |= {"base_model": str(folder / "model"), "sequence_len": 64, "micro_batch_size": 2}
    config |= {"datasets": [{"path": str(folder / "texts.jsonl"), "ds_type": "json", "type": "completion"}]}
    config |= {"dataset_prepared_path": str(folder / "prepared"), "special_tokens": {"pad_token": "<pad>"}}
    config["plugins"] = [*config["plugins"], "tests.integrations.axolotl_peaks.PeaksPlugin"]
    (folder / "config.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    script = "tests.integrations.axolotl_on_cpu"
    command = [sys.executable, "-W", "ignore", "-m", script, str(folder / "config.yml")]
    found = subprocess.run(command, env=os.environ | OFFLINE, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    state = json.loads((Path(config["output_dir"]) / "checkpoint-10" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    return found.stdout, losses, json.loads((Path(config["output_dir"]) / "peaks.json").read_text())


def test_ten_steps_are_those_of_plain_training_and_each_is_within_the_budget_also_resumed(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    lines = [json.dumps({"text": text(number, 24)}) for number in range(64)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    _, plain, plain_peaks = train(tmp_path, plugins=[], output_dir=str(tmp_path / "plain"))
    budget_bytes = 6200 * 1024
    options = {"memfit_budget": budget_bytes, "output_dir": str(tmp_path / "planned")}
    printed, losses, peaks = train(tmp_path, gradient_checkpointing=True, **options)
    assert len(plain) == len(peaks) == 10
    assert losses == plain
    assert max(peaks) <= budget_bytes < max(plain_peaks)
    assert "gradients  equal" in printed
    assert "budget     within" in printed
    checkpoint = str(tmp_path / "planned" / "checkpoint-8")
    _, resumed, _ = train(tmp_path, resume_from_checkpoint=checkpoint, **options)
    assert resumed == plain
