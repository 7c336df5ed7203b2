"""transformers' Trainer on batches of random lengths: plain, and with ``memfit.fit(batches=...)``, from one seed."""

from __future__ import annotations

import random
import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from trainer import StepMeter
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

import memfit
from memfit.units import format_bytes

VOCABULARY = 256
SHORTEST, LONGEST = 8, 128
ROWS = 2
BUDGET_SHARE = 0.6
"""Of the longest plain step's peak: a tiny model's weights, gradients and optimizer take much of the memory."""


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens, of a random number."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = random.Random(index)
        return _sentence(generator.randint(SHORTEST, LONGEST), index)


def _sentence(length: int, seed: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def collated(sentences: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch, padded to its longest sentence."""
    longest = max(len(each["input_ids"]) for each in sentences)

    def padded(name: str, value: int) -> Tensor:
        rows = [each[name] for each in sentences]
        return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row)), value=value) for row in rows])

    mask = torch.stack([(torch.arange(longest) < len(each["input_ids"])).long() for each in sentences])
    return {"input_ids": padded("input_ids", 0), "attention_mask": mask, "labels": padded("labels", -100)}


def trainer_measured(num_steps: int) -> dict[str, Any]:
    """Train plain and fitted, and return peaks, and whether losses and weights are the same."""
    plain, plain_peaks, _ = _trained(num_steps, None)
    budget_bytes = int(BUDGET_SHARE * max(plain_peaks))
    fitted, peaks, fit_seconds = _trained(num_steps, budget_bytes)
    num_over = sum(peak > budget_bytes for peak in peaks)
    weights = zip(plain.model.parameters(), fitted.model.parameters(), strict=True)
    num_different_weights = sum(not torch.equal(one, other) for one, other in weights)
    losses, plain_losses = (
        [entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (fitted, plain)
    )
    found = {
        "transformers": version("transformers"),
        "num_steps": len(peaks),
        "shortest": SHORTEST,
        "longest": LONGEST,
        "longest_plain_bytes": max(plain_peaks),
        "budget_bytes": budget_bytes,
        "largest_peak_bytes": max(peaks),
        "num_over": num_over,
        "num_plain_steps_over": sum(peak > budget_bytes for peak in plain_peaks),
        "num_different_weights": num_different_weights,
        "num_different_losses": sum(one != other for one, other in zip(losses, plain_losses, strict=True)),
        "fit_seconds": fit_seconds,
    }
    print(f"{len(peaks)} steps: {num_over} above the budget of {format_bytes(budget_bytes)}")
    print(f"largest peak {format_bytes(max(peaks))}, {format_bytes(max(plain_peaks))} plain")
    print(f"different losses: {found['num_different_losses']}, different weights: {num_different_weights}")
    return found


class _Fit(TrainerCallback):
    """Fits the trainer's own step when training begins, on the shortest and the longest batch."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.trainer: Any = None
        self.seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer

        def step(batches: list[dict[str, Tensor]]) -> None:
            # The second one is that which the loop fetches ahead.
            batch, _ = batches
            (micro_batch,), num_items = trainer.get_batch_samples(iter([batch]), 1, args.device)
            trainer.current_gradient_accumulation_steps = 1
            trainer.training_step(trainer.model, dict(micro_batch), num_items)
            trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), args.max_grad_norm)

        batches = []
        for length in (SHORTEST, LONGEST):
            sentences = [_sentence(length, 0), _sentence(length - 1, 1)]
            batches.append([collated(sentences), collated(sentences)])
        begin = time.perf_counter()
        self.fitted = memfit.fit(
            trainer.model, batches=batches, step=step, optimizer=kwargs["optimizer"], budget=self._budget_bytes
        )
        self.seconds = time.perf_counter() - begin
        print(self.fitted)


def _trained(num_steps: int, budget_bytes: int | None) -> tuple[Trainer, list[int], float]:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    meter = StepMeter()
    fit = None if budget_bytes is None else _Fit(budget_bytes)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            report_to=[],
            disable_tqdm=True,
            max_steps=num_steps,
            logging_steps=10,
            save_strategy="no",
            per_device_train_batch_size=ROWS,
            use_cpu=True,
        )
        trainer = Trainer(
            Qwen3ForCausalLM(config),
            arguments,
            data_collator=collated,
            train_dataset=Sentences(),
            callbacks=[meter] if fit is None else [fit, meter],
        )
        if fit is not None:
            fit.trainer = trainer
        trainer.train()
    return trainer, meter.peak_bytes, 0.0 if fit is None else fit.seconds
