"""Trains a GPT on batches of random lengths with ``fit(batches=...)``, and checks every step.

    python benchmarks/lengths.py [--steps N] [--longest LENGTH] [--device cpu|cuda]

Reported are the peaks of all steps beside the budget, whether the gradients of every length have the bits of the plain
step, how long finding the plan of a new length takes, and how much slower than by a plan of its own a step of any
length is predicted to be. The exit status is 1 where a step was above the budget or a gradient differed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import pairwise

import torch
from torch import Tensor, nn

import memfit
from memfit.models import gpt
from memfit.runtime.allocation_meter import allocated_peak
from memfit.runtime.forward_wrapping import plans_set_aside
from memfit.units import format_bytes

VOCABULARY = 256
ROWS = 4
SHORTEST = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = gpt(layers=4, width=options.width, heads=4, batch=1, length=options.longest, vocabulary=VOCABULARY)[0]
    model.to(device)

    def draw(length: int) -> Tensor:
        return torch.randint(VOCABULARY, (ROWS, length + 1), device=device)

    plain = memfit.profile(model, draw(options.longest))
    shortest = memfit.profile(model, draw(SHORTEST))
    budget_bytes = shortest.peak_bytes + (plain.peak_bytes - shortest.peak_bytes) // 2
    begin = time.perf_counter()
    fitted = memfit.fit(model, batches=[draw(SHORTEST), draw(options.longest)], budget=budget_bytes)
    print(fitted)
    print(
        f"fit took {time.perf_counter() - begin:.1f} s; the longest plain step takes {format_bytes(plain.peak_bytes)}"
    )
    generator = random.Random(0)
    lengths = [generator.randint(SHORTEST, options.longest) for _ in range(options.steps)]
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
    print(f"{len(peaks)} steps of {len(seen)} lengths: {num_over} above the budget of {format_bytes(budget_bytes)}")
    print(f"largest peak {format_bytes(max(peaks))}; lengths with other gradients than the plain step: {num_different}")
    print(f"finding the plan of a new length took at most {1e3 * max(lookup_seconds):.2f} ms")
    print(f"at most {100 * most_slower(fitted):.2f} points slower than a plan of its own")
    fitted.remove()
    sys.exit(1 if num_over or num_different else 0)


def seconds_to_find_plan(fitted: memfit.Fitted, model: nn.Module, batch: Tensor) -> float:
    from memfit.runtime.model_inputs import inputs_of

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
    main()
