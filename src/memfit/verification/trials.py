"""Runs a step by several methods, interleaved, each time from the same state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from torch import Tensor

from memfit.capture.measuring.clocks import host_time, wait_for
from memfit.capture.measuring.devices import device_of
from memfit.capture.recording.recorded_runs import no_garbage_collection, record_step
from memfit.capture.state.kept_state import KeptState, existed_before
from memfit.capture.training_step import TrainingStep
from memfit.distributed.wrapped_models import num_warm_up_steps
from memfit.graph.inputs import Input
from memfit.progress import Progress
from memfit.runtime.allocation_meter import allocated_peak
from memfit.runtime.applying.model_inputs import noting_inputs
from memfit.verification.gradients import GradientDifference, Gradients, compared_now, compared_run
from memfit.verification.methods import Method

# Enough rounds for quartiles to mean something; more where steps are short, up to this many seconds of them.
_FEWEST_ROUNDS = 5
_MOST_ROUNDS = 25
_TIMING_SECONDS = 2.0


class Measured(NamedTuple):
    """The peak of one run of the step, and the gradients it left; or how they differ from those of another run."""

    peak_bytes: int
    gradients: Gradients
    difference: GradientDifference


class Trials:
    """Runs of one training step that leave everything as it was."""

    def __init__(self, step: TrainingStep, *, plain_fits: bool = True) -> None:
        self._step = step
        self._state = KeptState(step)
        # Where the plain step does not fit, it is not run to find what else it reads.
        self._held = None if plain_fits else [tensor for _, tensor in step.tensors()]
        self.device = device_of(step)
        # What the model was called with when it last warmed up.
        self.inputs: tuple[Input, ...] = ()

    def kept_optimizer(self) -> AbstractContextManager[None]:
        """Return what all runs go inside: afterwards the optimizer knows of none of them."""
        return self._state.kept_optimizer()

    def warm_up(self, method: Method) -> None:
        """Run the step, so that later runs find caches filled and kernels chosen."""
        num_runs = 0
        while num_runs < num_warm_up_steps(self._step.model) or not self._state.is_warm:
            with self._state.kept(), method(self._step.model), noting_inputs(self._step.model) as inputs:
                self._step.run()
            num_runs += 1
        self.inputs = tuple(inputs)

    def measured(self, method: Method, reference: Gradients | None = None) -> Measured:
        """Return the peak and the gradients of a run; with a ``reference``, how they differ from it instead."""
        held = self._tensors_from_outside()
        with self._state.kept(), method(self._step.model):
            peak_bytes = self._peak_of_run(held)
            if not self._state.consumes_gradients:
                return Measured(peak_bytes, *compared_now(self._step, reference))
        with self._state.kept(), method(self._step.model):
            return Measured(peak_bytes, *compared_run(self._step, reference))

    def peak_bytes(self, method: Method) -> int:
        """Return the peak of a run."""
        held = self._tensors_from_outside()
        with self._state.kept(), method(self._step.model):
            return self._peak_of_run(held)

    def _peak_of_run(self, held: Sequence[Tensor]) -> int:
        with no_garbage_collection():
            return allocated_peak(self._step.run, self.device, held)

    def seconds(self, method: Method) -> float:
        """Return how long a run takes."""
        now = host_time(self.device)
        with self._state.kept(), method(self._step.model):
            wait_for(self.device)
            begin = now()
            self._step.run()
            wait_for(self.device)
            return now() - begin

    def interleaved_seconds(self, methods: Sequence[Method], progress: Progress) -> list[list[float]]:
        """Return the seconds of each method's runs. Rounds run all, in alternating order, so that drifts cancel out."""
        progress.stage("timing", num_steps=None)
        round_seconds = sum(self.seconds(method) for method in methods)
        num_rounds = min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, int(_TIMING_SECONDS / max(round_seconds, 1e-9))))
        num_rounds = self._step.ranks.agreed(num_rounds)
        progress.stage("timing", num_steps=num_rounds * len(methods))
        seconds: list[list[float]] = [[] for _ in methods]
        places = list(range(len(methods)))
        for _ in range(num_rounds):
            for place in places:
                seconds[place].append(self.seconds(methods[place]))
                progress.advance()
            places.reverse()
        return seconds

    def _tensors_from_outside(self) -> list[Tensor]:
        """Return what counts from the start, such as targets that only the loss knows.

        On a GPU the allocator counts them itself.
        """
        if self._held is None and self.device.type == "cuda":
            self._held = []
        if self._held is None:
            # Only after a whole run is it known what there was before a run.
            with self._state.kept():
                self._step.run()
            with self._state.kept():
                self._held = list(record_step(self._step, self.device, existed_before)[0].outside)
        return self._held
