"""transformers' Trainer with memfit's callback, beside plain training and ``gradient_checkpointing=True``.

    python benchmarks/trainer.py [--json benchmarks/results/trainer-h200.json] [--steps N] [--small]

A Qwen3 with grouped-query attention (28 layers, width 1024) trains in bf16 on 8 x 2,048 tokens with AdamW. memfit gets
half of the plain peak. Reported are the peaks of all steps by the device's allocator, the median seconds of a step, and
whether the losses are those of plain training. With --small, a tiny model trains on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from memfit.environment import environment_facts
from memfit.integrations.transformers import MemfitCallback
from memfit.runtime.allocation_meter import AllocationMeter
from memfit.units import format_bytes

_NUM_SKIPPED = 2
"""The first steps, in which kernels are chosen and the optimizer makes its state, count for peaks only."""


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self._length, self._vocabulary = length, vocabulary

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, self._vocabulary, (self._length,), generator=generator)
        return {"input_ids": ids, "labels": ids}


class StepMeter(TrainerCallback):
    """The peak and the seconds of each step."""

    def __init__(self) -> None:
        self.peak_bytes: list[int] = []
        self.seconds: list[float] = []
        self._meter: AllocationMeter | None = None
        self._begin = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to count, after all callbacks before this one."""
        if not torch.cuda.is_available():
            model = kwargs["model"]
            self._meter = AllocationMeter([*model.parameters(), *model.buffers()])
            self._meter.__enter__()
        self._restart()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the step, with its optimizer."""
        if self._meter is None:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._begin)
        self.peak_bytes.append(torch.cuda.max_memory_allocated() if self._meter is None else self._meter.peak_bytes)
        self._restart()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop counting."""
        if self._meter is not None:
            self._meter.__exit__(None, None, None)

    def _restart(self) -> None:
        if self._meter is None:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            self._meter.restart_peak()
        self._begin = time.perf_counter()


@dataclass(frozen=True)
class Row:
    """One training: the peak of each step, seconds of the later ones with their quartiles, and the losses."""

    method: str
    peak_bytes: list[int]
    seconds: float
    seconds_25: float
    seconds_75: float
    losses: list[float]
    budget_bytes: int | None = None
    preparing_seconds: float = 0.0


def trained(method: str, callbacks: Sequence[TrainerCallback], num_steps: int, *, small: bool, **options: Any) -> Row:
    """Train from the same weights on the same data, and return what was measured."""
    torch.manual_seed(0)
    width, layers, length = (64, 3, 64) if small else (1024, 28, 2048)
    config = Qwen3Config(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4 if small else 16,
        num_key_value_heads=2 if small else 8,
        head_dim=16 if small else 64,
        vocab_size=256 if small else 32_000,
        use_cache=False,
    )
    # A trainer refers to itself; the one before would be counted.
    gc.collect()
    meter = StepMeter()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            report_to=[],
            disable_tqdm=True,
            max_steps=num_steps,
            logging_steps=1,
            save_strategy="no",
            per_device_train_batch_size=2 if small else 8,
            use_cpu=small,
            bf16=not small,
            **options,
        )
        trainer = Trainer(
            Qwen3ForCausalLM(config),
            arguments,
            train_dataset=Sentences(length, config.vocab_size),
            callbacks=[*callbacks, meter],
        )
        begin = time.perf_counter()
        trainer.train()
        wall_seconds = time.perf_counter() - begin
    timed = meter.seconds[_NUM_SKIPPED:]
    low, _, high = quantiles(timed, n=4)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    row = Row(method, meter.peak_bytes, median(timed), low, high, losses, None, wall_seconds - sum(meter.seconds))
    print(f"{method}: peak {format_bytes(max(row.peak_bytes))}, {row.seconds:.3f} s per step", flush=True)
    return row


def main() -> int:
    """Train in the three ways, print a table, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [trained("plain", [], options.steps, small=options.small)]
    budget_bytes = max(rows[0].peak_bytes) // 2
    rows.append(
        trained("gradient_checkpointing=True", [], options.steps, small=options.small, gradient_checkpointing=True)
    )
    if options.small:
        # A tiny model's weights and optimizer take most of the memory.
        budget_bytes = max(rows[0].peak_bytes) * 9 // 10
    row = trained("MemfitCallback(half)", [MemfitCallback(budget_bytes)], options.steps, small=options.small)
    rows.append(Row(**{**asdict(row), "budget_bytes": budget_bytes}))
    _write(options.json, rows)
    rows.append(trained("plain again", [], options.steps, small=options.small))
    table = Table("method", "peak of all steps", "seconds per step", "relative", "before the first step", "losses")
    for row in rows:
        table.add_row(
            row.method,
            f"{format_bytes(min(row.peak_bytes))} to {format_bytes(max(row.peak_bytes))}",
            f"{row.seconds:.3f} ({row.seconds_25:.3f} to {row.seconds_75:.3f})",
            f"{row.seconds / rows[0].seconds:.3f}",
            f"{row.preparing_seconds:.1f} s",
            "as plain" if row.losses == rows[0].losses else "differ",
        )
    Console(width=140).print(table)
    num_over = sum(peak > budget_bytes for peak in rows[2].peak_bytes)
    print(f"{num_over} of {len(rows[2].peak_bytes)} steps over the budget of {format_bytes(budget_bytes)}")
    _write(options.json, rows)
    return 1 if num_over else 0


def _write(path: Path | None, rows: Sequence[Row]) -> None:
    if path is not None:
        facts = environment_facts() | {"transformers": version("transformers")}
        path.write_text(json.dumps({"environment": facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
