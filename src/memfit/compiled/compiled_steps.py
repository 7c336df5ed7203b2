"""Compiles the repeated blocks of a model, tries each of their partitions in the real step, and describes both as data.

A menu of partitions is read from the graphs of a first step, which saves as little as possible. Then every entry of the
menu runs in all blocks of a step: its gradients must be those of the partition that saves everything, its memory is
measured from border to border, and its time interleaved with the plain step's. So are a few choices of what the eager
engine recomputes outside blocks. In a job of several processes, all try the same in the same order.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from statistics import median

import torch
from torch import Tensor, nn

from memfit.capture.measuring.clocks import wait_for
from memfit.capture.measuring.devices import device_of
from memfit.capture.recording.blocks import find_blocks
from memfit.capture.recording.recorded_runs import no_garbage_collection, record_step
from memfit.capture.state.bits import same_bits
from memfit.capture.state.kept_state import KeptState, existed_before
from memfit.capture.training_step import TrainingStep
from memfit.compiled.described_trials import Trial, described
from memfit.compiled.outside_plans import plans_outside
from memfit.compiled.partition_menus import LEAST, kinds_of, merged_kinds
from memfit.compiled.step_segments import MemoryBorders, TimeBorders, TimedSegment, memory_meter_on
from memfit.distributed.wrapped_models import bare_model
from memfit.graph.compiled_data.compiled_blocks import (
    CompiledKind,
    CompiledProfile,
    Partition,
    tolerance_of,
)
from memfit.graph.model_profile import ModelProfile
from memfit.progress import Progress
from memfit.runtime.applying.apply import apply
from memfit.runtime.applying.batch_tensors import tensors_of
from memfit.runtime.compiling.planned_blocks import PlannedBlocks, original_of
from memfit.verification.gradients import GradientDifference, Gradients, compared_now, compared_run

_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 10
_TIMING_SECONDS = 4.0
_CHANGES = "its forward changes a number in its code from step to step, so that each step would compile it again"
_NO_MEMORY = "the step runs out of memory, even where blocks save as little as possible"


def profile_of_compiled_step(
    step: TrainingStep,
    state: KeptState,
    progress: Progress,
    num_cuts: int,
    plain: ModelProfile,
    of_same_blocks: CompiledProfile | None = None,
) -> CompiledProfile:
    """Return what compiled blocks take in ``step``, inside the block of ``state.kept_optimizer()``.

    ``num_cuts`` is how many partitions each kind of block has, besides torch's own; ``plain`` is the profile of the
    step without compiled blocks. ``of_same_blocks`` describes another step in which the same blocks run, such as the
    one without a chunked loss: its partitions are taken, of which compiled code and gradients are known.
    """
    # Compiled code writes unseen, such as the running statistics of batch norms.
    buffers = [(buffer, buffer.detach().clone()) for buffer in step.model.buffers()]
    try:
        # A plain run finds what each run must restore.
        with suppress(torch.OutOfMemoryError), state.kept():
            step.run()
        compiled_step = _CompiledStep(step, state, progress, num_cuts, plain)
        return compiled_step.profile() if of_same_blocks is None else compiled_step.profile_by(of_same_blocks)
    finally:
        for buffer, content in buffers:
            if not same_bits(buffer, content):
                buffer.detach().copy_(content)


class _CompiledStep:
    def __init__(
        self, step: TrainingStep, state: KeptState, progress: Progress, num_cuts: int, plain: ModelProfile
    ) -> None:
        self._step = step
        self._state = state
        self._progress = progress
        self._num_cuts = num_cuts
        self._plain = plain
        self._model = bare_model(step.model)
        self._device = device_of(step)
        self._not_compiled: dict[str, str] = {}

    def profile(self) -> CompiledProfile:
        begin = time.perf_counter()
        kinds = self._discovered_kinds()
        trials = self._compiled_trials(kinds)
        if not trials:
            kinds = ()
        compile_seconds = time.perf_counter() - begin
        kinds, trials = self._with_equal_gradients(kinds, trials)
        return replace(self._timed_profile(kinds, list(trials.values())), compile_seconds=compile_seconds)

    def profile_by(self, known: CompiledProfile) -> CompiledProfile:
        """Return the profile with the partitions of another step's."""
        self._not_compiled = dict(known.not_compiled)
        num_places = max((len(kind.partitions) for kind in known.kinds), default=0)
        trials = [Trial(_partitions_at(known.kinds, place)) for place in range(num_places)]
        self._progress.stage("measuring compiled blocks", num_steps=num_places)
        self._held = self._tensors_from_outside()
        for trial in trials:
            with self._state.kept(), self._running(trial):
                self._step.run()
            self._measure(trial)
            self._progress.advance()
        return replace(self._timed_profile(known.kinds, trials), compile_seconds=known.compile_seconds)

    def _timed_profile(self, kinds: tuple[CompiledKind, ...], trials: Sequence[Trial]) -> CompiledProfile:
        outside = self._outside_trials(kinds, trials)
        plain_seconds = self._time([*trials, *outside])
        if not kinds:
            return CompiledProfile((), (), (), plain_seconds, plain_seconds, not_compiled=self._not_compiled)
        profile = replace(described(kinds, trials, plain_seconds, outside), not_compiled=self._not_compiled)
        # All processes plan with what the fullest one measured.
        return self._step.ranks.largest(profile, max(border.peak_bytes for border in trials[0].memory.borders))

    @contextmanager
    def _running(self, trial: Trial, borders: MemoryBorders | TimeBorders | None = None) -> Iterator[None]:
        """Let the step run as in ``trial`` inside the block."""
        if trial.outside is None:
            with PlannedBlocks(self._model, trial.partitions, borders):
                yield
            return
        with apply(self._model, trial.outside), PlannedBlocks(self._model, trial.partitions, borders):
            yield

    def _discovered_kinds(self) -> tuple[CompiledKind, ...]:
        """Run a step with as little saved as possible, and return the kinds of the blocks that could be compiled."""
        modules = dict(self._model.named_modules())
        paths = _blocks_of(self._model)
        self._progress.stage("compiling blocks", num_steps=None)
        least = Trial(dict.fromkeys(paths, LEAST))
        borders = TimeBorders(self._device)
        if not self._fits(least, borders):
            self._not_compiled = dict.fromkeys(paths, _NO_MEMORY)
            return ()
        self._not_compiled.update(borders.failures)
        if any(self._step.ranks.gathered(self._state.changes_attributes)):
            self._leave_out_changing(least)
        for path in borders.called_again:
            self._not_compiled.setdefault(path, "it is called again before its backward pass")
        for path, graphs in borders.graphs.items():
            if not any(graph.forward is not None for graph in graphs):
                self._not_compiled.setdefault(path, "it has no backward pass")
        self._not_compiled = dict(
            chain.from_iterable(each.items() for each in self._step.ranks.gathered(self._not_compiled))
        )
        compiled = {path: graphs for path, graphs in borders.graphs.items() if path not in self._not_compiled}
        kinds = kinds_of(
            compiled, {path: type(original_of(modules[path])).__name__ for path in compiled}, self._num_cuts
        )
        return merged_kinds(self._step.ranks.gathered(kinds))

    def _leave_out_changing(self, trial: Trial) -> None:
        """Compile none of the blocks that still run a new graph in the third of three steps, or fail to."""
        borders = TimeBorders(self._device)
        with self._state.kept(may_write_more=True), self._running(trial, borders):
            for _ in range(2):
                self._step.run()
                known = {path: set(graphs) for path, graphs in borders.graphs.items()}
                self._state.begin_next()
            self._step.run()
        borders.close()
        changing = [path for path, graphs in known.items() if not graphs.issuperset(borders.graphs[path])]
        self._not_compiled |= borders.failures | dict.fromkeys(changing, _CHANGES)

    def _compiled_trials(self, kinds: Sequence[CompiledKind]) -> dict[int, Trial]:
        """Return a trial for each place in the menus, compiled.

        Left out are those for which the device has no memory, and those that could not be compiled.
        """
        trials: dict[int, Trial] = {}
        failures: dict[str, str] = {}
        num_places = max((len(kind.partitions) for kind in kinds), default=0)
        self._progress.stage("compiling blocks", num_steps=num_places)
        for place in range(num_places):
            trial = Trial(_partitions_at(kinds, place))
            borders = TimeBorders(self._device)
            fits = self._fits(trial, borders)
            failed = dict(chain.from_iterable(each.items() for each in self._step.ranks.gathered(borders.failures)))
            failures |= failed
            if fits and not failed:
                trials[place] = trial
            self._progress.advance()
        if failures and trials:
            path, reason = next(iter(failures.items()))
            warnings.warn(
                f"{num_places - len(trials)} of {num_places} partitions are left out, since compiling a block failed "
                f"with them; {path!r}: {reason}",
                stacklevel=2,
            )
        if not trials:
            self._not_compiled |= {path: failures.get(path, _NO_MEMORY) for kind in kinds for path in kind.blocks}
        return trials

    def _fits(self, trial: Trial, borders: TimeBorders) -> bool:
        """Run the step as in ``trial``; return whether the device of every process has the memory for it."""
        fits = True
        try:
            with self._state.kept(), self._running(trial, borders):
                self._step.run()
        except torch.OutOfMemoryError:
            fits = False
        borders.close()
        return all(self._step.ranks.gathered(fits))

    def _with_equal_gradients(
        self, kinds: tuple[CompiledKind, ...], trials: Mapping[int, Trial]
    ) -> tuple[tuple[CompiledKind, ...], dict[int, Trial]]:
        """Measure the memory of the trials; drop those whose gradients differ from the first one's beyond rounding."""
        self._progress.stage("measuring compiled blocks", num_steps=len(trials))
        self._held = self._tensors_from_outside()
        kept: dict[int, Trial] = {}
        reference: Gradients | None = None
        tolerance = tolerance_of(kinds)
        for place, trial in trials.items():
            gradients, difference = self._compared(trial, reference)
            self._progress.advance()
            if reference is None:
                reference = gradients
            is_equal = difference.largest_distance <= tolerance
            if all(self._step.ranks.gathered(is_equal)):
                kept[place] = trial
        kinds = tuple(
            replace(kind, partitions=tuple(each for place, each in enumerate(kind.partitions) if place in kept))
            for kind in kinds
        )
        return kinds, dict(enumerate(kept.values()))

    def _outside_trials(self, kinds: Sequence[CompiledKind], trials: Sequence[Trial]) -> list[Trial]:
        """Return trials in which blocks hold the least, and the eager engine recomputes values outside blocks."""
        if not trials:
            return []
        least = trials[-1]
        measured = []
        for plan in plans_outside(self._plain, [path for kind in kinds for path in kind.blocks]):
            trial = Trial(least.partitions, plan)
            self._measure(trial)
            is_alike = [(each.kind, each.path) for each in trial.memory.borders] == [
                (each.kind, each.path) for each in least.memory.borders
            ]
            if all(self._step.ranks.gathered(is_alike)):
                measured.append(trial)
        return measured

    def _compared(self, trial: Trial, reference: Gradients | None) -> tuple[Gradients, GradientDifference]:
        """Measure the memory of a trial; return its gradients, or how they differ from a ``reference``."""
        with self._measured(trial):
            if not self._state.consumes_gradients:
                return compared_now(self._step, reference)
        with self._state.kept(), self._running(trial):
            return compared_run(self._step, reference)

    @contextmanager
    def _measured(self, trial: Trial) -> Iterator[None]:
        """Measure the memory of a trial; the gradients of its step are there inside the block."""
        with self._state.kept(), no_garbage_collection(), memory_meter_on(self._device, self._held) as meter:
            borders = MemoryBorders(meter)
            with self._running(trial, borders):
                self._step.run()
            borders.close()
            trial.memory = borders
            yield

    def _measure(self, trial: Trial) -> None:
        """Measure the memory of a trial whose gradients are known."""
        with self._measured(trial):
            pass

    def _time(self, trials: Sequence[Trial]) -> float:
        """Time the trials interleaved with the plain step; return the plain step's seconds."""
        plain: list[float] = []
        plain_fits = True
        num_rounds = _FEWEST_ROUNDS
        done = 0
        self._progress.stage("timing compiled blocks", num_steps=None)
        while done < num_rounds:
            begin = time.perf_counter()
            for trial in trials:
                trial.timed.append(self._timed(trial))
            if plain_fits:
                try:
                    plain.append(sum(segment.seconds for segment in self._timed(Trial({}))))
                except torch.OutOfMemoryError:
                    plain_fits = False
            done += 1
            round_seconds = time.perf_counter() - begin
            num_rounds = min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, int(_TIMING_SECONDS / round_seconds)))
            num_rounds, plain_fits = self._step.ranks.agreed((num_rounds, plain_fits))
        return median(plain) if plain else 0.0

    def _timed(self, trial: Trial) -> list[TimedSegment]:
        with self._state.kept():
            wait_for(self._device)
            borders = TimeBorders(self._device)
            with self._running(trial, borders):
                self._step.run()
            return borders.segments()

    def _tensors_from_outside(self) -> list[Tensor]:
        if self._device.type == "cuda":
            return []
        with suppress(torch.OutOfMemoryError), self._state.kept():
            return list(record_step(self._step, self._device, existed_before)[0].outside)
        return [*self._model.parameters(), *self._model.buffers(), *tensors_of(self._step.batch)]


def _blocks_of(model: nn.Module) -> list[str]:
    """Return the paths of the repeated blocks, also of those that the user compiled."""
    paths = [path for path, _ in model.named_modules()]
    return find_blocks(model, paths)


def _partitions_at(kinds: Sequence[CompiledKind], place: int) -> dict[str, Partition]:
    """Return the partition at ``place`` of each block's menu; the last one of a menu that is shorter."""
    return {path: kind.partitions[min(place, len(kind.partitions) - 1)] for kind in kinds for path in kind.blocks}
