"""A budget for transformers' Trainer: one callback, nothing else changes.

python examples/transformers_trainer.py        # needs transformers and accelerate
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from memfit.integrations.transformers import MemfitCallback


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens, every one of them a target."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def new_trainer(folder: str, callbacks: Sequence[TrainerCallback], **options: object) -> Trainer:
    """Return a trainer of a small Llama, always from the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64, use_cache=False
    )
    arguments = {"max_steps": 5, "per_device_train_batch_size": 4, "logging_steps": 1, **options}
    return Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(folder, report_to=[], use_cpu=True, disable_tqdm=True, **arguments),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=list(callbacks),
    )


def main() -> None:
    callback = MemfitCallback("1900KiB")
    with tempfile.TemporaryDirectory() as folder:
        new_trainer(folder, [callback]).train()
    print(callback.fitted)


if __name__ == "__main__":
    main()
