"""A Qwen3 with grouped-query attention trained on batches of random lengths, by four methods in one process."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import memfit
from memfit.runtime.allocation_meter import allocated_peak
from memfit.units import format_bytes

_NUM_SKIPPED = 10
"""The first steps, in which kernels are chosen and the allocator reserves memory, count for peaks only."""
_BUDGET_SHARE = 0.5


class Scale(NamedTuple):
    """The sizes of the model and its batches."""

    layers: int
    width: int
    heads: int
    key_heads: int
    vocabulary: int
    rows: int
    fast_path: int
    middle: int
    longest: int


LARGE = Scale(28, 1024, 16, 8, 32_000, 2, 128, 2048, 8192)
SMALL = Scale(3, 32, 4, 2, 512, 2, 16, 128, 256)


@dataclass(frozen=True)
class Row:
    """The steps of one method: their largest peak, how many were over the budget, tokens per second and the losses.

    ``budget_bytes`` is None where the method knows no budget.
    """

    method: str
    budget_bytes: int | None
    peak_bytes: int
    num_over: int
    tokens_per_second: float
    preparing_seconds: float
    losses: list[float]


def measured(device: torch.device, num_steps: int, *, small: bool) -> dict[str, Any]:
    """Train by each method from the same weights on the same batches, and return the numbers."""
    scale = SMALL if small else LARGE
    model = _model(scale, device)
    weights = copy.deepcopy(model.state_dict())
    lengths = _lengths(scale, num_steps)
    plain_bytes = max(_trained(model, _optimizer(model), scale, [scale.longest] * 2, device).peak_bytes)
    model.load_state_dict(weights)
    # A tiny model's weights and optimizer take most of the memory.
    budget_bytes = int(plain_bytes * (0.65 if small else _BUDGET_SHARE))
    batches = [_batch(scale, length, device) for length in (scale.fast_path, scale.middle, scale.longest)]

    def fitted_by_size(optimizer: Any) -> memfit.Fitted:
        return memfit.fit(model, batches=batches, budget=budget_bytes, optimizer=optimizer)

    def fitted_to_longest(optimizer: Any) -> memfit.Fitted:
        return memfit.fit(model, batches[-1], budget=budget_bytes, optimizer=optimizer)

    methods: dict[str, tuple[int | None, Callable[[Any], AbstractContextManager[Any]]]] = {
        "plain": (None, lambda _: nullcontext()),
        "memfit, a plan for each length": (budget_bytes, fitted_by_size),
        "memfit, one plan for the longest": (budget_bytes, fitted_to_longest),
        "gradient_checkpointing=True": (None, lambda _: _checkpointing(model)),
    }
    rows = []
    for name, (budget, prepare) in methods.items():
        model.load_state_dict(weights)
        optimizer = _optimizer(model)
        begin = time.perf_counter()
        with prepare(optimizer) as prepared:
            preparing_seconds = time.perf_counter() - begin
            if isinstance(prepared, memfit.Fitted):
                print(prepared)
            run = _trained(model, optimizer, scale, lengths, device)
        print(f"{name}: prepared in {preparing_seconds:.1f} s, trained in {sum(run.seconds):.1f} s", flush=True)
        num_over = 0 if budget is None else sum(peak > budget for peak in run.peak_bytes)
        rows.append(
            Row(
                name,
                budget,
                max(run.peak_bytes),
                num_over,
                scale.rows * sum(lengths[_NUM_SKIPPED:]) / sum(run.seconds[_NUM_SKIPPED:]),
                preparing_seconds,
                run.losses,
            )
        )
    _print(rows, scale)
    return {
        "scale": scale._asdict(),
        "num_steps": num_steps,
        "longest_plain_bytes": plain_bytes,
        "rows": [asdict(row) for row in rows],
        "num_over": sum(row.num_over for row in rows),
    }


class _Run(NamedTuple):
    peak_bytes: list[int]
    seconds: list[float]
    losses: list[float]


def _trained(model: Any, optimizer: Any, scale: Scale, lengths: Sequence[int], device: torch.device) -> _Run:
    """Train one step on a batch of each length: forward, backward and AdamW, measured with the device idle between."""
    peaks: list[int] = []
    seconds: list[float] = []
    losses: list[float] = []
    for number, length in enumerate(lengths):
        batch = _batch(scale, length, device, seed=number)
        held: list[Tensor] = [*model.parameters(), *model.buffers(), *batch.values()]
        held += [entry for state in optimizer.state.values() for entry in state.values() if torch.is_tensor(entry)]
        _wait_for(device)
        begin = time.perf_counter()

        def step(batch: dict[str, Tensor] = batch) -> None:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        peaks.append(allocated_peak(step, device, held))
        optimizer.zero_grad()
        _wait_for(device)
        seconds.append(time.perf_counter() - begin)
    return _Run(peaks, seconds, losses)


def _model(scale: Scale, device: torch.device) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=scale.width,
        intermediate_size=3 * scale.width,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.key_heads,
        head_dim=scale.width // scale.heads,
        vocab_size=scale.vocabulary,
        max_position_embeddings=scale.longest,
        use_cache=False,
    )
    torch.manual_seed(0)
    # Matrix products in bf16 are slow on most processors.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return Qwen3ForCausalLM(config).to(device, dtype).train()


def _optimizer(model: Any) -> torch.optim.Optimizer:
    # A learning rate at which bf16 weights move: losses of the methods are compared over the whole training.
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _batch(scale: Scale, length: int, device: torch.device, *, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(scale.vocabulary, (scale.rows, length), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids.clone()}


def _lengths(scale: Scale, num_steps: int) -> list[int]:
    """Return random lengths; the longest is among the first, so that its peak is measured however few steps run."""
    generator = random.Random(0)
    lengths = [generator.randint(scale.fast_path, scale.longest) for _ in range(num_steps)]
    lengths[min(1, num_steps - 1)] = scale.longest
    return lengths


@contextmanager
def _checkpointing(model: Any) -> Iterator[None]:
    model.gradient_checkpointing_enable()
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _print(rows: Sequence[Row], scale: Scale) -> None:
    table = Table("method", "budget", "largest peak", "steps over", "tokens/s", "relative", "prepared in", "losses")
    for row in rows:
        differences = [abs(one - other) for one, other in zip(row.losses, rows[0].losses, strict=True)]
        table.add_row(
            row.method,
            "none" if row.budget_bytes is None else format_bytes(row.budget_bytes),
            format_bytes(row.peak_bytes),
            "" if row.budget_bytes is None else f"{row.num_over} of {len(row.losses)}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.tokens_per_second / rows[0].tokens_per_second:.3f}",
            f"{row.preparing_seconds:.1f} s",
            "as plain" if not any(differences) else f"differ by up to {max(differences):.2g}",
        )
    console = Console(width=160)
    console.print(f"batches of {scale.rows} rows with {scale.fast_path} to {scale.longest} tokens")
    console.print(table)
