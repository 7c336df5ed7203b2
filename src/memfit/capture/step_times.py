"""Times whole training steps: alone, and one after the other as in training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import median, quantiles
from typing import NamedTuple

import torch

from memfit.capture.clocks import wait_for
from memfit.capture.kept_state import KeptState
from memfit.capture.step import TrainingStep
from memfit.graph.model_profile import Phase

_NUM_STEPS_ALONE = 4
# Long enough for a GPU to grow as warm, and its clocks as slow, as they stay in training.
_SECONDS_IN_A_ROW = 0.7
_FEWEST_IN_A_ROW, _MOST_IN_A_ROW = 4, 20


class StepAlone(NamedTuple):
    """The seconds to launch the forward pass and the rest of the step, and until all of it was done: usual ones.

    A host that shares its machine launches at its best now and then only, and steps in a row take what is usual.
    """

    forward_launched: float
    backward_launched: float
    seconds: float


def timed_alone(step: TrainingStep, device: torch.device, state: KeptState) -> StepAlone:
    """Run the step several times, waiting for the device before and after, leaving no trace of it."""
    return _of_each(median, _timings_alone(step, device, state))


def _timings_alone(step: TrainingStep, device: torch.device, state: KeptState) -> list[StepAlone]:
    timings: list[StepAlone] = []
    for _ in range(_NUM_STEPS_ALONE):
        forward_end = 0.0

        @contextmanager
        def around(phase: Phase) -> Iterator[None]:
            nonlocal forward_end
            yield
            if phase is Phase.FORWARD:
                forward_end = time.perf_counter()

        with state.kept():
            wait_for(device)
            begin = time.perf_counter()
            held = step.run(around)
            launched = time.perf_counter()
            del held
            wait_for(device)
            timings.append(StepAlone(forward_end - begin, launched - forward_end, time.perf_counter() - begin))
    return timings


def timed_in_turns(
    step: TrainingStep,
    device: torch.device,
    state: KeptState,
    way: Callable[[], AbstractContextManager[object]],
    *,
    num_turns: int,
) -> tuple[StepAlone, StepAlone]:
    """Time the plain step and the one inside ``way()`` in turns: a host that slows down does so for both.

    What the two differ by is small, and a host that is disturbed half of the time would have the say in their medians:
    so a quarter of the steps may be faster than what is told.
    """
    plain: list[StepAlone] = []
    other: list[StepAlone] = []
    for _ in range(num_turns):
        plain += _timings_alone(step, device, state)
        with way():
            # The first step may have to get ready.
            with state.kept():
                step.run()
            other += _timings_alone(step, device, state)
    return _of_each(_lower_quartile, plain), _of_each(_lower_quartile, other)


def timed_in_a_row(step: TrainingStep, device: torch.device, state: KeptState, alone: StepAlone) -> float:
    """Return the seconds of one of many steps between which nobody waits for the device, as training loops run them."""
    num_steps = min(max(math.ceil(_SECONDS_IN_A_ROW / alone.seconds), _FEWEST_IN_A_ROW), _MOST_IN_A_ROW)
    with state.kept():
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(num_steps):
            state.begin_another()
            step.run()
        wait_for(device)
        seconds = time.perf_counter() - begin
    # The first of them begins on an idle device, as the one alone did.
    return max(seconds - alone.seconds, 0.0) / (num_steps - 1)


def _of_each(usual: Callable[[Sequence[float]], float], timings: Sequence[StepAlone]) -> StepAlone:
    return StepAlone(*(usual(times) for times in zip(*timings, strict=True)))


def _lower_quartile(times: Sequence[float]) -> float:
    return quantiles(times, n=4, method="inclusive")[0]
