"""What the engine costs: memfit's replay beside the plain step and torch's own checkpointing, on one GPT.

    python benchmarks/engine.py [--size gpu-bound|launch-bound|cpu] [--json results.json]

Interleaved rounds: every method takes a few steps in turn, so that drift affects all of them alike. Times are
medians over all rounds, with the spread from the first to the third quartile; a ratio is to the plain step of the same
run. The activation peak is what the allocator saw above parameters and
gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from entrant import Method
from gpt import GPT, tokens
from measuring import Row, as_data, machine, measure, print_rows
from peers import eager_peers
from torch import Tensor

import memfit


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
    "launch-bound": Size(12, 1024, 1, 512, torch.bfloat16, num_rounds=25, steps_per_round=10),
    "cpu": Size(12, 256, 2, 128, torch.float32, num_rounds=7, steps_per_round=3),
}
EVERY_BLOCK = "torch: checkpoint every block"
POINTWISE = ["blocks.*::aten.gelu", "blocks.*::aten.native_layer_norm"]


def methods(model: GPT, batch: Tensor) -> dict[str, Method]:
    profile = memfit.profile(model, batch)
    pointwise = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=POINTWISE)
    full = memfit.plan(profile, strategy=memfit.Full())
    peers = eager_peers(list(model.blocks))
    return {
        "plain": contextlib.nullcontext,
        # Shows the spread between two equal methods, and whether the kernels themselves give the same bits twice.
        "plain again": contextlib.nullcontext,
        "memfit: pointwise replayed": lambda: memfit.apply(model, pointwise),
        "memfit: blocks replayed": lambda: memfit.apply(model, full),
        **{name: peers[name] for name in peers if name == EVERY_BLOCK or "attention" in name},
    }


def run(size: Size, device: torch.device) -> list[Row]:
    torch.manual_seed(0)
    model = GPT(size.num_blocks, size.width).to(device=device, dtype=size.dtype)
    batch = tokens(size.batch, size.length, device)

    def output_and_loss() -> tuple[Tensor, Tensor]:
        loss = model(batch)
        return loss, loss

    return measure(
        methods(model, batch),
        output_and_loss,
        model,
        [batch],
        num_rounds=size.num_rounds,
        steps_per_round=size.steps_per_round,
        keep_gradients=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, action="append", help="may be given several times")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = {}
    for name in options.size or (["gpu-bound", "launch-bound"] if device.type == "cuda" else ["cpu"]):
        rows = run(SIZES[name], device)
        results[name] = as_data(rows)
        print_rows(f"{name}, {machine()}", rows)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine(), "sizes": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
