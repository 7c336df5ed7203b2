"""Times whole training steps: alone, and one after the other as in training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import quantiles
from typing import NamedTuple

import torch

from memfit.capture.clocks import moments_on, wait_for
from memfit.capture.kept_state import KeptState
from memfit.capture.training_step import TrainingStep
from memfit.graph.model_profile import Phase

_NUM_STEPS_ALONE = 4
# Long enough for a GPU to grow as warm, and its clocks as slow, as they stay in training, and for the host to come
# through a bad moment, which on a shared machine takes half a second.
_SECONDS_IN_A_ROW = 1.5
_FEWEST_IN_A_ROW, _MOST_IN_A_ROW = 5, 30


class StepAlone(NamedTuple):
    """The seconds to launch the forward pass and the rest of the step, and until all of it was done.

    A quarter of the steps may be faster: a host that shares its machine is disturbed for a part of the time, and its
    very best is as rare.
    """

    forward_launched: float
    backward_launched: float
    seconds: float


def timed_alone(step: TrainingStep, device: torch.device, state: KeptState) -> StepAlone:
    """Run the step several times, waiting for the device before and after, leaving no trace of it."""
    return _lower_quartiles(_timings_alone(step, device, state))


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
    """Time the plain step and the one inside ``way()`` in turns: a host that slows down does so for both."""
    plain: list[StepAlone] = []
    other: list[StepAlone] = []
    for _ in range(num_turns):
        plain += _timings_alone(step, device, state)
        with way():
            # The first step may have to get ready.
            with state.kept():
                step.run()
            other += _timings_alone(step, device, state)
    return _lower_quartiles(plain), _lower_quartiles(other)


def timed_in_a_row(step: TrainingStep, device: torch.device, state: KeptState, alone: StepAlone) -> float:
    """Return the seconds of one of many steps between which nobody waits for the device, as training loops run them.

    As of steps alone, a quarter may be faster. By their mean, one bad moment of the host would be taken for what all
    that it does costs.
    """
    num_steps = min(max(math.ceil(_SECONDS_IN_A_ROW / alone.seconds), _FEWEST_IN_A_ROW), _MOST_IN_A_ROW)
    moments = moments_on(device)
    with state.kept():
        wait_for(device)
        for _ in range(num_steps):
            state.begin_another()
            step.run()
            # The first of the steps begins on an idle device, as the one alone did: it ends where counting begins.
            moments.mark()
        return _lower_quartile(moments.seconds_between())


def _lower_quartiles(timings: Sequence[StepAlone]) -> StepAlone:
    return StepAlone(*map(_lower_quartile, zip(*timings, strict=True)))


def _lower_quartile(times: Sequence[float]) -> float:
    return quantiles(times, n=4, method="inclusive")[0]
