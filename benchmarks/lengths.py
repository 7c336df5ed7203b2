"""Trains on batches of random lengths with ``fit(batches=...)``, and checks every step.

    python benchmarks/lengths.py [--steps N] [--longest LENGTH] [--device cpu|cuda] [--json PATH]
    python benchmarks/lengths.py --model qwen3 --device cuda --json benchmarks/results/lengths-h200.json
    python benchmarks/lengths.py --model qwen3 --small

With ``--model gpt``, the default, reported are the peaks of all steps beside the budget, whether the gradients of every
length have the bits of the plain step, how long finding the plan of a new length takes, and how much slower than by a
plan of its own a step of any length is predicted to be. The exit status is 1 where a step was above the budget or a
gradient differed.

With ``--model qwen3``, a Qwen3 with grouped-query attention trains in bf16 with AdamW on lengths from 128 to 8,192, at
half of the longest plain step's peak. Peaks and tokens per second stand beside those of one plan for the longest
length, of ``gradient_checkpointing`` and of plain training, which no budget limits. The exit status is 1 where a step
was above the budget. With ``--small``, a tiny one trains on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lengths_qwen3
import torch
from torch import Tensor, nn

import memfit
from memfit.models import gpt
from memfit.report.environment import environment_facts
from memfit.runtime.allocation_meter import allocated_peak
from memfit.runtime.applying.forward_wrapping import plans_set_aside
from memfit.units import format_bytes

VOCABULARY = 256
ROWS = 4
SHORTEST = 16


def main() -> int:
    """Train, print what was found, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "qwen3"), default="gpt")
    parser.add_argument("--steps", type=int, help="2,000 of the GPT or 500 of the Qwen3 where not given")
    parser.add_argument("--longest", type=int, default=512, help="the longest length of the GPT")
    parser.add_argument("--width", type=int, default=64, help="the width of the GPT")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="a tiny Qwen3, to try the script")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.model == "gpt":
        found = gpt_measured(device, options.steps or 2000, options.longest, options.width)
    else:
        found = lengths_qwen3.measured(device, options.steps or 500, small=options.small)
    if options.json is not None:
        environment = environment_facts()
        if device.type == "cuda":
            environment["GPU"] = torch.cuda.get_device_name(device)
        found = {"environment": environment, "model": options.model, **found}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["num_over"] or found.get("num_lengths_with_other_gradients") else 0


def gpt_measured(device: torch.device, num_steps: int, longest: int, width: int) -> dict[str, Any]:
    """Train a GPT on random lengths, check each step, and return the numbers."""
    torch.manual_seed(0)
    model = gpt(layers=4, width=width, heads=4, batch=1, length=longest, vocabulary=VOCABULARY)[0]
    model.to(device)

    def draw(length: int) -> Tensor:
        return torch.randint(VOCABULARY, (ROWS, length + 1), device=device)

    plain = memfit.profile(model, draw(longest))
    fast_path = memfit.profile(model, draw(SHORTEST))
    budget_bytes = fast_path.peak_bytes + (plain.peak_bytes - fast_path.peak_bytes) // 2
    begin = time.perf_counter()
    fitted = memfit.fit(model, batches=[draw(SHORTEST), draw(longest)], budget=budget_bytes)
    fit_seconds = time.perf_counter() - begin
    print(fitted)
    print(f"fit took {fit_seconds:.1f} s; the longest plain step takes {format_bytes(plain.peak_bytes)}")
    generator = random.Random(0)
    lengths = [generator.randint(SHORTEST, longest) for _ in range(num_steps)]
    peaks: list[int] = []
    num_different = 0
    lookup_seconds: list[float] = []
    seen: set[int] = set()
    for length in lengths:
        batch = draw(length)
        if length not in seen:
            seen.add(length)
            lookup_seconds.append(seconds_to_find_plan(fitted, model, batch))
            num_different += not has_plain_gradients(model, batch)
        model.zero_grad()
        held = [*model.parameters(), *model.buffers(), batch]
        peaks.append(allocated_peak(lambda batch=batch: model(batch).backward(), device, held))
    num_over = sum(peak > budget_bytes for peak in peaks)
    slower = most_slower(fitted)
    print(f"{len(peaks)} steps of {len(seen)} lengths: {num_over} above the budget of {format_bytes(budget_bytes)}")
    print(f"largest peak {format_bytes(max(peaks))}; lengths with other gradients than the plain step: {num_different}")
    print(f"finding the plan of a new length took at most {1e3 * max(lookup_seconds):.2f} ms")
    print(f"at most {100 * slower:.2f} points slower than a plan of its own")
    fitted.remove()
    return {
        "num_steps": len(peaks),
        "num_lengths": len(seen),
        "fast_path": SHORTEST,
        "longest": longest,
        "longest_plain_bytes": plain.peak_bytes,
        "budget_bytes": budget_bytes,
        "largest_peak_bytes": max(peaks),
        "num_over": num_over,
        "num_lengths_with_other_gradients": num_different,
        "num_plans": len(fitted.plans.entries),
        "most_seconds_to_find_plan": max(lookup_seconds),
        "most_points_slower": 100 * slower,
        "fit_seconds": fit_seconds,
    }


def seconds_to_find_plan(fitted: memfit.Fitted, model: nn.Module, batch: Tensor) -> float:
    from memfit.runtime.applying.model_inputs import inputs_of

    begin = time.perf_counter()
    fitted.plans.place_for(inputs_of(type(model).forward.__get__(model), (batch,), {}))
    return time.perf_counter() - begin


def has_plain_gradients(model: nn.Module, batch: Tensor) -> bool:
    found = gradients_of(model, batch)
    with plans_set_aside(model):
        expected = gradients_of(model, batch)
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def gradients_of(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(batch).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def most_slower(fitted: memfit.Fitted) -> float:
    """Return by how much of a step the plan that a length runs by is slower than the next shorter one's, at most.

    A plan that is made for a length is no faster than that for the next shorter planned length.
    """
    overheads = [entry.plan.predicted_overhead for entry in fitted.plans.entries]
    return max((after - before for before, after in pairwise(overheads)), default=0.0)


if __name__ == "__main__":
    sys.exit(main())
