"""A budget for torchtitan's Trainer: an activation checkpointing policy, nothing else changes.

torchrun --nproc-per-node 1 examples/torchtitan_trainer.py        # needs torchtitan and a GPU
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from memfit.integrations.torchtitan import MemfitAC

LENGTH = 64


class RandomTokens(BaseDataLoader):
    """Batches of random tokens, always the same ones."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, local_batch_size: int, dp_rank: int, **_: Any) -> None:
        self.num_sequences = local_batch_size
        self.generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = torch.randint(0, 2048, (self.num_sequences, LENGTH + 1), generator=self.generator)
            positions = torch.arange(LENGTH).expand(self.num_sequences, LENGTH)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class NoTokenizer(BaseTokenizer):
    """Stands in for a tokenizer, since there is no text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def small_llama(folder: str, *, policy: Any, **training: Any) -> Trainer.Config:
    """Return the configuration of two layers of torchtitan's smallest Llama, trained for ten steps."""
    model = model_registry("debugmodel")
    del model.model.layers[2:]
    for layer in model.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=model,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        tokenizer=NoTokenizer.Config(),
        dataloader=RandomTokens.Config(),
        training=TrainingConfig(
            **{"local_batch_size": 16, "seq_len": LENGTH, "steps": 10, "disable_cuda_graphs": True, **training}
        ),
        activation_checkpoint=policy,
    )


def main() -> None:
    init_logger()
    with tempfile.TemporaryDirectory() as folder:
        trainer = small_llama(folder, policy=MemfitAC.Config(budget="64MiB")).build()
        trainer.train()
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
