"""`MemfitCallback` in transformers' Trainer: losses as without, peaks within the budget, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from examples.transformers_trainer import new_trainer
from tests.integrations.step_peaks import StepPeaks
from transformers import Trainer, TrainerCallback

from memfit.integrations.transformers import MemfitCallback
from memfit.runtime.applying.forward_wrapping import is_wrapped

# torch and the frameworks warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore")
BUDGET = "2500KiB"


class Watched(TrainerCallback):
    """The peak of each step."""

    def __init__(self) -> None:
        self.step_peaks = StepPeaks()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_peaks.begin(kwargs["model"], kwargs["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_peaks.end_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_peaks.end()


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trained(folder: Path, callbacks: Sequence[TrainerCallback], **options: Any) -> Trainer:
    trainer = new_trainer(str(folder), callbacks, **{"save_strategy": "no", **options})
    trainer.train()
    return trainer


def weights_agree(a: Trainer, b: Trainer) -> bool:
    return all(map(torch.equal, a.model.parameters(), b.model.parameters()))


def test_ten_steps_are_those_of_plain_training_and_each_is_within_the_budget(tmp_path: Path) -> None:
    options = {"max_steps": 10, "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}
    plain_peaks = Watched()
    plain = trained(tmp_path, [plain_peaks], **options)
    budget_bytes = 8 * max(plain_peaks.step_peaks.peaks) // 10
    callback, watched = MemfitCallback(budget_bytes), Watched()
    fitted = trained(tmp_path, [callback, watched], **options)
    assert losses_of(fitted) == losses_of(plain)
    assert weights_agree(fitted, plain)
    assert callback.fitted is not None
    assert callback.fitted.verification.gradients_equal
    assert len(watched.step_peaks.peaks) == 10
    assert max(watched.step_peaks.peaks) <= budget_bytes
    assert not any(is_wrapped(module) for module in fitted.model.modules())


def test_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    whole = trained(tmp_path, [], max_steps=4)
    trained(tmp_path, [MemfitCallback(BUDGET)], max_steps=4, save_strategy="steps", save_steps=2)
    resumed = new_trainer(str(tmp_path), [MemfitCallback(BUDGET)], max_steps=4, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert weights_agree(resumed, whole)


class OwnLoss(Trainer):
    """A trainer with a loss of its own, which counts its calls."""

    num_calls = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.num_calls += 1
        output = model(input_ids=inputs["input_ids"])
        return output.logits.float().square().mean()


def test_a_trainers_own_compute_loss_is_measured_and_its_counters_are_kept(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [MemfitCallback(BUDGET)]):
        trainer = new_trainer(str(tmp_path), callbacks, max_steps=3, save_strategy="no")
        trainer.__class__ = OwnLoss
        trainer.num_calls = 0
        trainer.train()
        found.append((losses_of(trainer), trainer.num_calls))
    assert found[0] == found[1]
    assert found[0][1] == 3


def test_gradient_checkpointing_is_switched_off_with_a_message(tmp_path: Path) -> None:
    callback = MemfitCallback(BUDGET)
    trainer = new_trainer(str(tmp_path), [callback], max_steps=1, save_strategy="no", gradient_checkpointing=True)
    with pytest.warns(UserWarning, match="gradient_checkpointing=True was switched off"):
        trainer.train()
    assert not trainer.model.is_gradient_checkpointing
    assert callback.fitted is not None
