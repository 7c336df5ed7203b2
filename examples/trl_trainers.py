"""A budget for TRL's trainers, here supervised fine-tuning and DPO: one callback, nothing else changes.

python examples/trl_trainers.py        # needs trl
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import torch
from datasets import Dataset
from peft import PeftConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from memfit.integrations.transformers import MemfitCallback

WORDS = [f"w{number}" for number in range(60)]
ARGUMENTS = {
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "max_steps": 4,
    "save_strategy": "no",
}


def tokenizer() -> PreTrainedTokenizerFast:
    ids = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model() -> LlamaForCausalLM:
    """Return a small Llama, always with the same weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=2,
            vocab_size=63,
            use_cache=False,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def text(number: int, length: int) -> str:
    return " ".join(WORDS[(7 * number + 13 * place) % len(WORDS)] for place in range(length))


def new_sft_trainer(
    folder: str, callbacks: Sequence[TrainerCallback], *, adapters: PeftConfig | None = None, **options: object
) -> Trainer:
    """Return a trainer on texts."""
    texts = Dataset.from_list([{"text": text(number, 24)} for number in range(64)])
    return SFTTrainer(
        model(),
        SFTConfig(folder, **{"per_device_train_batch_size": 2, **ARGUMENTS, **options}),
        train_dataset=texts,
        eval_dataset=texts.select(range(2)),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        peft_config=adapters,
    )


def new_dpo_trainer(
    folder: str, callbacks: Sequence[TrainerCallback], *, adapters: PeftConfig | None = None, **options: object
) -> Trainer:
    """Return a trainer on pairs of texts."""
    pairs = Dataset.from_list(
        [{"prompt": text(n, 4), "chosen": " " + text(n + 1, 24), "rejected": " " + text(n + 2, 24)} for n in range(64)]
    )
    return DPOTrainer(
        model(),
        model() if adapters is None else None,
        DPOConfig(folder, **{"per_device_train_batch_size": 1, **ARGUMENTS, **options}),
        train_dataset=pairs,
        eval_dataset=pairs.select(range(2)),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        peft_config=adapters,
    )


def main() -> None:
    callback = MemfitCallback("10MiB")
    with tempfile.TemporaryDirectory() as folder:
        new_dpo_trainer(folder, [callback]).train()
    print(callback.fitted)


if __name__ == "__main__":
    main()
