"""Times whole training steps: synchronized, and back-to-back as in training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from statistics import quantiles
from typing import NamedTuple

import torch

from memfit.capture.measuring.clocks import host_time, moments_on, wait_for
from memfit.capture.state.kept_state import KeptState
from memfit.capture.training_step import TrainingStep
from memfit.graph.model_profile import Phase

_NUM_SYNCHRONIZED_STEPS = 4
_NUM_INTERLEAVED_STEPS = 2
# Long enough for a GPU to reach the temperature and clock of training, and longer than a disturbance of a shared host,
# which lasts about half a second.
_BACK_TO_BACK_SECONDS = 1.5
_FEWEST_BACK_TO_BACK, _MOST_BACK_TO_BACK = 5, 30


class SynchronizedStep(NamedTuple):
    """The seconds to launch the forward pass and the rest of the step, and until all of it was done.

    Each is the 25th percentile over the steps: a shared host is disturbed for a part of the time, and its fastest
    step is an exception too.
    """

    forward_launched: float
    backward_launched: float
    seconds: float


def timed_synchronized(step: TrainingStep, device: torch.device, state: KeptState) -> SynchronizedStep:
    """Run the step several times, synchronizing with the device before and after each."""
    return _lower_quartiles(_synchronized_timings(step, device, state, _NUM_SYNCHRONIZED_STEPS))


def _synchronized_timings(
    step: TrainingStep, device: torch.device, state: KeptState, num_steps: int
) -> list[SynchronizedStep]:
    now = host_time(device)
    timings: list[SynchronizedStep] = []
    for _ in range(num_steps):
        with state.kept():
            wait_for(device)
            phases = [(now(), Phase.FORWARD)]
            step.run(partial(_note, phases, now))
            launched = now()
            wait_for(device)
            seconds = now() - phases[0][0]
        ends = [moment for moment, _ in phases[1:]] + [launched]
        forward = sum(end - moment for (moment, phase), end in zip(phases, ends, strict=True) if phase is Phase.FORWARD)
        timings.append(SynchronizedStep(forward, launched - phases[0][0] - forward, seconds))
    return timings


def _note(phases: list[tuple[float, Phase]], now: Callable[[], float], phase: Phase) -> None:
    phases.append((now(), phase))


def timed_interleaved(
    step: TrainingStep,
    device: torch.device,
    state: KeptState,
    method: Callable[[], AbstractContextManager[object]],
    *,
    num_rounds: int,
) -> tuple[SynchronizedStep, SynchronizedStep]:
    """Time the plain step and the one inside ``method()`` interleaved, so that a slower host slows both."""
    plain: list[SynchronizedStep] = []
    other: list[SynchronizedStep] = []
    for _ in range(num_rounds):
        plain += _synchronized_timings(step, device, state, _NUM_INTERLEAVED_STEPS)
        with method():
            # The first step warms up.
            with state.kept():
                step.run()
            other += _synchronized_timings(step, device, state, _NUM_INTERLEAVED_STEPS)
    return _lower_quartiles(plain), _lower_quartiles(other)


def timed_back_to_back(
    step: TrainingStep, device: torch.device, state: KeptState, synchronized: SynchronizedStep
) -> float:
    """Return the 25th percentile of the seconds of steps without synchronization between them, as training loops run.

    A mean would include disturbances of the host.
    """
    num_steps = min(
        max(math.ceil(_BACK_TO_BACK_SECONDS / synchronized.seconds), _FEWEST_BACK_TO_BACK), _MOST_BACK_TO_BACK
    )
    num_steps = step.ranks.agreed(num_steps)
    moments = moments_on(device)
    with state.kept():
        wait_for(device)
        for _ in range(num_steps):
            state.begin_another()
            step.run()
            # The first step begins on an idle device and is not counted.
            moments.mark()
        return _lower_quartile(moments.seconds_between())


def _lower_quartiles(timings: Sequence[SynchronizedStep]) -> SynchronizedStep:
    return SynchronizedStep(*map(_lower_quartile, zip(*timings, strict=True)))


def _lower_quartile(times: Sequence[float]) -> float:
    return quantiles(times, n=4, method="inclusive")[0]
