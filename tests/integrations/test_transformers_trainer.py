"""`MemfitCallback` in transformers' Trainer and TRL's: losses as without, peaks within the budget, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from examples.transformers_trainer import Sentences, new_trainer
from tests.integrations.trainer_peaks import Watched
from torch import Tensor
from transformers import Trainer, TrainerCallback

from memfit.integrations.transformers import MemfitCallback
from memfit.runtime.applying.forward_wrapping import is_wrapped

# torch and the frameworks warn of each other.
pytestmark = pytest.mark.filterwarnings("ignore")


def logged(trainer: Trainer) -> list[dict[str, float]]:
    """Return what the trainer logged of losses, gradients and rewards, and nothing that depends on the clock."""
    timed = ("runtime", "per_second")
    return [
        {name: number for name, number in entry.items() if not name.endswith(timed)}
        for entry in trainer.state.log_history
    ]


def weights_agree(a: Trainer, b: Trainer) -> bool:
    return all(map(torch.equal, a.model.parameters(), b.model.parameters()))


def trained_both_ways(
    make: Callable[..., Trainer], folder: Path, share: float, **options: Any
) -> tuple[Trainer, MemfitCallback]:
    """Train plainly and within ``share`` of the peak of that; check that all is the same and each step within it.

    Where checkpoints are saved, training resumes from one and ends with the same weights.
    """
    plain_peaks = Watched()
    plain = make(str(folder / "plain"), [plain_peaks], **{**options, "gradient_checkpointing": False})
    plain.train()
    budget_bytes = int(share * max(plain_peaks.step_peaks.peaks))
    callback, watched = MemfitCallback(budget_bytes), Watched()
    fitted = make(str(folder), [callback, watched], **options)
    fitted.train()
    assert logged(fitted) == logged(plain)
    assert weights_agree(fitted, plain)
    assert callback.fitted is not None
    assert callback.fitted.verification.gradients_equal
    assert len(watched.step_peaks.peaks) == fitted.state.global_step
    assert max(watched.step_peaks.peaks) <= budget_bytes
    assert not any(is_wrapped(module) for module in fitted.model.modules())
    if "save_steps" in options:
        resumed = make(str(folder), [MemfitCallback(budget_bytes)], **options)
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{options['save_steps']}"))
        assert weights_agree(resumed, plain)
    return fitted, callback


def test_ten_steps_are_those_of_plain_training_and_each_is_within_the_budget_also_resumed(tmp_path: Path) -> None:
    options = {
        "max_steps": 10,
        "gradient_accumulation_steps": 2,
        "label_smoothing_factor": 0.1,
        "max_grad_norm": 0.5,
        "bf16": True,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 8,
    }
    trained_both_ways(new_trainer, tmp_path, 0.85, **options)


class OwnLoss(Trainer):
    """A trainer with a loss of its own, which counts its calls."""

    num_calls = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.num_calls += 1
        output = model(input_ids=inputs["input_ids"])
        return output.logits.float().square().mean()


def new_trainer_with_own_loss(folder: str, callbacks: Sequence[TrainerCallback], **options: object) -> Trainer:
    trainer = new_trainer(folder, callbacks, max_steps=3, save_strategy="no", **options)
    trainer.__class__ = OwnLoss
    return trainer


def test_a_trainers_own_loss_is_measured_and_its_counters_are_kept(tmp_path: Path) -> None:
    fitted, _ = trained_both_ways(new_trainer_with_own_loss, tmp_path, 0.85)
    assert fitted.num_calls == 3


def test_gradient_checkpointing_is_switched_off_with_a_message(tmp_path: Path) -> None:
    callback = MemfitCallback("1GiB")
    trainer = new_trainer(str(tmp_path), [callback], max_steps=1, save_strategy="no", gradient_checkpointing=True)
    with pytest.warns(UserWarning, match="gradient_checkpointing=True was switched off"):
        trainer.train()
    assert not trainer.model.is_gradient_checkpointing
    assert callback.fitted is not None


class Growing(Sentences):
    """Sentences of two lengths, and longer ones after those that are looked at before training."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = 16 + index // 4 % 2 * 8 if index < 32 else 64
        return {name: tokens[:length] for name, tokens in super().__getitem__(index).items()}


def new_trainer_on_growing_sentences(folder: str, callbacks: Sequence[TrainerCallback], **options: object) -> Trainer:
    options |= {"max_steps": 10, "save_strategy": "no", "train_sampling_strategy": "sequential"}
    trainer = new_trainer(folder, callbacks, **options)
    trainer.train_dataset = Growing()
    return trainer


def test_lengths_are_those_of_the_data_and_longer_batches_are_planned_for_when_they_come(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained_both_ways(new_trainer_on_growing_sentences, tmp_path, 0.85)
    told = [str(each.message) for each in caught if "larger than the largest that was planned for" in str(each.message)]
    assert len(told) == 1
    assert told[0].startswith("a batch of size 64")


ALL_AT_ONCE = {
    "gradient_accumulation_steps": 2,
    "bf16": True,
    "gradient_checkpointing": True,
    "eval_strategy": "steps",
    "eval_steps": 3,
}


# Most of their peak are buffers of TRL's loss, which no plan makes smaller.
@pytest.mark.parametrize(
    ("make", "share", "options"),
    [
        ("new_sft_trainer", 0.9, {}),
        ("new_sft_trainer", 0.95, {**ALL_AT_ONCE, "packing": True, "max_length": 48}),
        ("new_dpo_trainer", 0.95, {}),
        ("new_dpo_trainer", 0.97, ALL_AT_ONCE),
    ],
    ids=["sft", "sft with adapters, packing, …", "dpo", "dpo with adapters, …"],
)
def test_ten_steps_of_trainers_of_trl_are_the_plain_ones_and_within_the_budget_also_resumed(
    make: str, share: float, options: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    from examples import trl_trainers
    from peft import LoraConfig

    adapters = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "up_proj"]) if options else None
    steps = {"max_steps": 10, "save_strategy": "steps", "save_steps": 8}
    trained_both_ways(getattr(trl_trainers, make), tmp_path, share, **steps, **options, adapters=adapters)
