"""How long steps take, one after the other as in training."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import nn

from memfit.capture.measuring.clocks import moments_on

Step = Callable[[], object]


class TimedStep(NamedTuple):
    """What a step took, and how long a little work on the host did meanwhile, if somebody looked."""

    seconds: float
    look_seconds: float | None = None


def seconds_in_a_row(step: Step, device: torch.device, num_steps: int, *, num_lead_in_steps: int = 1) -> list[float]:
    """Return the seconds of each of so many steps after the first ones, between which nobody waits for the device.

    That is how training runs: the host launches a step while the device still computes the one before.
    """
    for _ in range(num_lead_in_steps - 1):
        step()
    if device.type == "cpu":
        step()
        seconds = []
        for _ in range(num_steps):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        return seconds
    moments = moments_on(device)
    for _ in range(num_steps + 1):
        # The first step's end is where the second begins.
        step()
        moments.mark()
    return moments.seconds_between()


def watched_in_a_row(
    step: Step,
    model: nn.Module,
    look: Callable[[], float],
    device: torch.device,
    num_steps: int,
    *,
    num_lead_in_steps: int = 1,
) -> list[TimedStep]:
    """Time steps as `seconds_in_a_row` does, and look at the host from within, on both threads that launch a step."""
    looks: list[list[float]] = []

    def look_within(*_: object) -> None:
        looks[-1].append(look())

    def step_watched() -> None:
        looks.append([look()])
        step()

    with _called_within_steps(look_within, model):
        seconds = seconds_in_a_row(step_watched, device, num_steps, num_lead_in_steps=num_lead_in_steps)
    looks.append([look()])
    return [
        # Where the next one begins, this one ends. The first ones were not timed.
        TimedStep(of_step, statistics.mean((*looks[number], looks[number + 1][0])))
        for number, of_step in enumerate(seconds, start=num_lead_in_steps)
    ]


@contextmanager
def _called_within_steps(look: Callable[..., None], model: nn.Module) -> Iterator[None]:
    """Have ``look`` called after the forward pass, and early and late in the backward pass, by the threads of these."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with ExitStack() as hooks:
        handles = [model.register_forward_hook(look)]
        handles += [trained[place].register_post_accumulate_grad_hook(look) for place in (0, -1)]
        for handle in handles:
            hooks.callback(handle.remove)
        yield


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Let no collection come between, and have those that are asked for look at nothing that is there already."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
