"""What the engine costs: memfit's replay beside the plain step and torch's own checkpointing, on one GPT.

    python benchmarks/engine.py [--size gpu-bound|launch-bound|cpu] [--json results.json]

Interleaved rounds: every way takes a few steps in turn, so that drift of the machine meets all of them alike. Times are
medians over all rounds, with the spread from the first to the third quartile; a ratio is to the plain step of the same
run. The activation peak is what the allocator (on the CPU: the ledger of live storages) saw above parameters and
gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from gpt import GPT, tokens
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memfit
from memfit.runtime.ledger import peak_of
from memfit.units import format_bytes


@dataclass(frozen=True)
class Size:
    num_blocks: int
    width: int
    batch: int
    length: int
    dtype: torch.dtype
    num_rounds: int
    steps_per_round: int


SIZES = {
    "gpu-bound": Size(24, 2048, 8, 2048, torch.bfloat16, num_rounds=12, steps_per_round=3),
    "launch-bound": Size(12, 1024, 1, 512, torch.bfloat16, num_rounds=15, steps_per_round=10),
    "cpu": Size(12, 256, 2, 128, torch.float32, num_rounds=7, steps_per_round=3),
}
POINTWISE = ["blocks.*::aten.gelu", "blocks.*::aten.native_layer_norm"]
SAVED_BY_SELECTIVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def save_matmuls_and_attention(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_BY_SELECTIVE else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def checkpointed_blocks(model: GPT, **options: object) -> Iterator[None]:
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    try:
        yield
    finally:
        for block in model.blocks:
            del block.forward


def ways(model: GPT, batch: Tensor) -> dict[str, Callable[[], contextlib.AbstractContextManager[object]]]:
    profile = memfit.profile(model, batch)
    pointwise = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=POINTWISE)
    full = memfit.plan(profile, strategy=memfit.Full())
    selective = functools.partial(create_selective_checkpoint_contexts, save_matmuls_and_attention)
    return {
        "plain": contextlib.nullcontext,
        # Tells the spread between two equal ways, and whether the kernels themselves give the same bits twice.
        "plain again": contextlib.nullcontext,
        "memfit, pointwise replayed": lambda: memfit.apply(model, pointwise),
        "memfit, blocks replayed": lambda: memfit.apply(model, full),
        "torch, selective checkpointing": lambda: checkpointed_blocks(model, context_fn=selective),
        "torch, full checkpointing": lambda: checkpointed_blocks(model),
    }


def run(size: Size, device: torch.device) -> list[dict[str, object]]:
    torch.manual_seed(0)
    model = GPT(size.num_blocks, size.width).to(device=device, dtype=size.dtype)
    batch = tokens(size.batch, size.length, device)

    def step() -> None:
        # Gradients stay allocated, so that the peak above the start of the step is activations alone.
        model.zero_grad(set_to_none=False)
        model(batch).backward()

    model(batch).backward()
    everything = ways(model, batch)
    peaks = {name: activation_peak(step, model, batch, way, device) for name, way in everything.items()}
    gradients = {name: gradients_of(step, model, way) for name, way in everything.items()}
    seconds: dict[str, list[float]] = {name: [] for name in everything}
    for _ in range(size.num_rounds):
        for name, way in everything.items():
            with way():
                step()
                seconds[name].extend(seconds_of(step, device) for _ in range(size.steps_per_round))
    plain = statistics.median(seconds["plain"])
    return [
        {
            "way": name,
            "median_ms": 1e3 * statistics.median(times),
            "quartiles_ms": [1e3 * quartile for quartile in statistics.quantiles(times, n=4)[::2]],
            "ratio": statistics.median(times) / plain,
            "activation_peak_bytes": peaks[name],
            "gradients_equal": all(map(torch.equal, gradients[name], gradients["plain"])),
        }
        for name, times in seconds.items()
    ]


def activation_peak(
    step: Callable[[], None], model: nn.Module, batch: Tensor, way: Callable[..., object], device: torch.device
) -> int:
    held = [*model.parameters(), *(p.grad for p in model.parameters()), batch]
    with way():
        step()
        before = (
            torch.cuda.memory_allocated(device)
            if device.type == "cuda"
            else sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
        )
        return peak_of(step, device, held) - before


def gradients_of(step: Callable[[], None], model: nn.Module, way: Callable[..., object]) -> list[Tensor]:
    with way():
        step()
    return [parameter.grad.to("cpu", copy=True) for parameter in model.parameters()]


def seconds_of(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cpu":
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


def machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}, memfit {memfit.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, action="append", help="may be given several times")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = {}
    for name in options.size or (["gpu-bound", "launch-bound"] if device.type == "cuda" else ["cpu"]):
        rows = results[name] = run(SIZES[name], device)
        table = Table(
            "way", "median ms", "quartiles", "ratio", "activations", "gradients", title=f"{name}, {machine(device)}"
        )
        for row in rows:
            low, high = row["quartiles_ms"]
            table.add_row(
                row["way"],
                f"{row['median_ms']:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{row['ratio']:.3f}",
                format_bytes(row["activation_peak_bytes"]),
                "equal" if row["gradients_equal"] else "differ",
            )
        Console(width=140).print(table)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine(device), "sizes": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
