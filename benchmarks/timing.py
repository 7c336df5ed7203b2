"""How long steps take, one after the other as in training."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from memfit.capture.measuring.clocks import moments_on

Step = Callable[[], object]


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
