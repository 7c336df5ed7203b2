"""Trains on batches of random lengths with ``fit(batches=...)``, and checks every step.

    python benchmarks/lengths.py [--steps N] [--longest LENGTH] [--device cpu|cuda] [--json PATH]
    python benchmarks/lengths.py --model trainer [--steps N] [--json PATH]
    python benchmarks/lengths.py --model qwen3 --device cuda --json benchmarks/results/lengths-h200.json
    python benchmarks/lengths.py --model qwen3 --small

With ``--model gpt``, the default, reported are the peaks of all steps beside half of the longest plain step's, whether
the gradients of every length have the bits of the plain step, what the host spends before the first step of a length,
and how much slower than by a plan of its own a step is predicted to be. The exit status is 1 where a step was above the
budget or a gradient differed.

With ``--model trainer``, transformers' Trainer fine-tunes a tiny Qwen3 on padded batches of random lengths, plain and
with ``fit(batches=...)`` around its own training step. The exit status is 1 where a step was above the budget, or
weights differ at the end.

With ``--model qwen3``, a Qwen3 with grouped-query attention trains in bf16 with AdamW on lengths from 128 to 8,192, at
half of the longest plain step's peak. Peaks and tokens per second stand beside those of one plan for the longest
length, of ``gradient_checkpointing`` and of plain training, which no budget limits. The exit status is 1 where a step
was above the budget. With ``--small``, a tiny one trains on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import lengths_qwen3
import torch
from torch import Tensor, nn

import memfit
from memfit.environment import environment_facts
from memfit.graph.plan import Decision
from memfit.models import gpt
from memfit.planning.known_steps import known_step
from memfit.runtime.allocation_meter import allocated_peak
from memfit.runtime.applying.forward_wrapping import plans_set_aside
from memfit.units import format_bytes

VOCABULARY = 256
ROWS = 4
SHORTEST = 16
_NUM_SAMPLED = 24


def main() -> int:
    """Train, print what was found, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "trainer", "qwen3"), default="gpt")
    parser.add_argument("--steps", type=int, help="2,000, or 500 of the Qwen3, where not given")
    parser.add_argument("--longest", type=int, default=512, help="the longest length of the GPT")
    parser.add_argument("--width", type=int, default=64, help="the width of the GPT")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="a tiny Qwen3, to try the script")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.model == "gpt":
        found = gpt_measured(device, options.steps or 2000, options.longest, options.width)
    elif options.model == "trainer":
        # transformers is needed here only.
        from lengths_trainer import trainer_measured

        found = trainer_measured(options.steps or 2000)
    else:
        found = lengths_qwen3.measured(device, options.steps or 500, small=options.small)
    if options.json is not None:
        environment = environment_facts()
        if device.type == "cuda":
            environment["GPU"] = torch.cuda.get_device_name(device)
        found = {"environment": environment, "model": options.model, **found}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    different = found.get("num_lengths_with_other_gradients") or found.get("num_different_weights")
    return 1 if found["num_over"] or different else 0


def gpt_measured(device: torch.device, num_steps: int, longest: int, width: int) -> dict[str, Any]:
    """Train a GPT on random lengths, check each step, and return the numbers."""
    torch.manual_seed(0)
    model = gpt(layers=4, width=width, heads=4, batch=1, length=longest, vocabulary=VOCABULARY)[0]
    model.to(device)

    def draw(length: int) -> Tensor:
        return torch.randint(VOCABULARY, (ROWS, length + 1), device=device)

    plain = memfit.profile(model, draw(longest))
    budget_bytes = plain.peak_bytes // 2
    clock = _Clock(model)
    begin = time.perf_counter()
    fitted = memfit.fit(model, batches=[draw(SHORTEST), draw(longest)], budget=budget_bytes)
    fit_seconds = time.perf_counter() - begin
    print(fitted)
    print(f"fit took {fit_seconds:.1f} s; the longest plain step takes {format_bytes(plain.peak_bytes)}")
    generator = random.Random(0)
    lengths = [generator.randint(SHORTEST, longest) for _ in range(num_steps)]
    peaks: list[int] = []
    num_different = 0
    before_first: list[float] = []
    before_later: list[float] = []
    seen: set[int] = set()
    for length in lengths:
        batch = draw(length)
        model.zero_grad()
        held = [*model.parameters(), *model.buffers(), batch]

        def step(batch: Tensor = batch) -> None:
            clock.start()
            model(batch).backward()

        peaks.append(allocated_peak(step, device, held))
        (before_later if length in seen else before_first).append(clock.seconds)
        if length not in seen:
            seen.add(length)
            num_different += not has_plain_gradients(model, batch)
    num_over = sum(peak > budget_bytes for peak in peaks)
    fitted.remove()
    sampled = sorted(seen)[:: max(1, len(seen) // _NUM_SAMPLED)]
    slower = [points_slower(fitted, model, draw(length), budget_bytes) for length in sampled]
    print(f"{len(peaks)} steps of {len(seen)} lengths: {num_over} above the budget of {format_bytes(budget_bytes)}")
    print(f"largest peak {format_bytes(max(peaks))}; lengths with other gradients than the plain step: {num_different}")
    print(f"before the first step of a length the host spends at most {1e3 * max(before_first):.2f} ms")
    print(
        f"predicted to be at most {max(slower):.2f} points slower than by a plan of its own, of {len(slower)} lengths"
    )
    return {
        "num_steps": len(peaks),
        "num_lengths": len(seen),
        "shortest": SHORTEST,
        "longest": longest,
        "longest_plain_bytes": plain.peak_bytes,
        "budget_bytes": budget_bytes,
        "largest_peak_bytes": max(peaks),
        "num_over": num_over,
        "num_lengths_with_other_gradients": num_different,
        "num_plans": len(fitted.plans.entries),
        "most_seconds_before_first_step": max(before_first),
        "median_seconds_before_first_step": median(before_first),
        "median_seconds_before_later_step": median(before_later) if before_later else None,
        "num_lengths_compared": len(slower),
        "most_points_slower": max(slower),
        "fit_seconds": fit_seconds,
    }


class _Clock:
    """The host's seconds between calling the model and the beginning of its own forward."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds = self._begin = 0.0
        own_forward = type(model).forward

        @functools.wraps(own_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.seconds = time.thread_time() - self._begin
            return own_forward(*args, **kwargs)

        type(model).forward = forward  # type: ignore[method-assign]

    def start(self) -> None:
        """The model is about to be called. Time in which other processes run is not the host's work."""
        self._begin = time.thread_time()


def has_plain_gradients(model: nn.Module, batch: Tensor) -> bool:
    found = gradients_of(model, batch)
    with plans_set_aside(model):
        expected = gradients_of(model, batch)
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def gradients_of(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(batch).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def points_slower(fitted: memfit.Fitted, model: nn.Module, batch: Tensor, budget_bytes: int) -> float:
    """Return by how many points of its step the plan that a batch runs by is slower than a plan made for it alone."""
    profile = memfit.profile(model, batch)
    plan = fitted.plans.entries[fitted.plans.places_for(profile.inputs)[0]].plan
    own = memfit.plan(profile, budget=budget_bytes)
    return 100 * (predicted_overhead(plan, profile) - own.predicted_overhead)


def predicted_overhead(plan: memfit.Plan, profile: memfit.ModelProfile) -> float:
    """Return what is predicted of ``plan`` for the step of another ``profile``."""
    known = known_step(profile)
    recomputed = {
        index for index, value in enumerate(profile.values) if plan.decisions.get(value.name) is Decision.RECOMPUTE
    }
    return known.simulation(frozenset(known.step.recomputed_of(recomputed))).added_seconds / profile.step_seconds


if __name__ == "__main__":
    sys.exit(main())
