"""Finds steps whose structure is random or changes from step to step, and chooses the largest run of them to measure.

A model that skips layers at random runs other ops in each step, and one that sets itself up in its first step runs
others from then on. A plan for the largest run holds for smaller ones too: each block finds its own decisions.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from memfit.capture.recording.measured_blocks import bytes_of_skipped_blocks, values_leaving_skipped_blocks
from memfit.capture.recording.structure import Structure, structure_of_run
from memfit.capture.state.kept_state import KeptState
from memfit.capture.training_step import TrainingStep
from memfit.distributed.ranks import Ranks
from memfit.graph.model_profile import Block, RecordedOp, RecordedValue
from memfit.graph.names import path_and_ancestors

# The first steps of a loop that are looked at where one step changes what the next one begins with. Schedulers, and
# loops that count, may have room for few.
_NUM_STEPS = 2
# So many seeds notice a layer that is skipped in one step of ten in 99 of 100 models with twelve of them.
_NUM_FIRST_SEEDS = 3
# Where they differ, so many more: with twelve layers, each skipped in one step of ten, all run in one of four steps.
_NUM_MORE_SEEDS = 20


class Variants(NamedTuple):
    """The runs of a step that were looked at, of which the last is measured; ``notes`` say what differs, in words."""

    runs: tuple[Structure, ...] = ()
    notes: tuple[str, ...] = ()

    def bytes_of_skipped_blocks(
        self, model: nn.Module, blocks: Sequence[Block], ops: Sequence[RecordedOp], values: Sequence[RecordedValue]
    ) -> int:
        """Return what the blocks that ran in other runs only would take, beside those of the chosen one."""
        return bytes_of_skipped_blocks(model, blocks, self._called, ops, values)

    @property
    def skipped_modules(self) -> tuple[str, ...]:
        """The outermost modules that some runs call and others skip."""
        skipped = self._skipped
        return tuple(sorted(path for path in skipped if skipped.isdisjoint([*path_and_ancestors(path)][1:])))

    @property
    def _called(self) -> frozenset[str]:
        return frozenset().union(*(run.called for run in self.runs))

    @property
    def _skipped(self) -> frozenset[str]:
        return self._called - frozenset.intersection(*(run.called for run in self.runs)) if self.runs else frozenset()

    def values_to_save(self, model: nn.Module, ops: Sequence[RecordedOp], blocks: Sequence[Block]) -> set[int]:
        """Return the values that plans must save: those that other runs have not, or not under the same address.

        That is what a module's op makes that runs more often in some runs than in others, since its calls cannot be
        matched by counting, and what leaves blocks that are skipped in some.
        """
        if not self.runs:
            return set()
        varying = frozenset().union(*(self.runs[-1].varying_ops(run) for run in self.runs))
        of_varying = {
            value
            for op in ops
            if op.module is not None and (op.module, op.op) in varying
            for value in op.outputs
            if value is not None
        }
        return of_varying | values_leaving_skipped_blocks(model, self._skipped, ops, blocks)


def random_states() -> tuple[str, ...]:
    """Return the state of the random number generators that decide in Python: where one changes, it was drawn from."""
    numpy = sys.modules.get("numpy")
    return str(random.getstate()), "" if numpy is None else str(numpy.random.get_state(legacy=False))


def choose_variant(step: TrainingStep, state: KeptState, device: torch.device, *, decides: bool) -> Variants:
    """Let the largest run of ``step`` be the one that is measured, where runs of it differ.

    ``decides`` is whether Python read random numbers, or numbers of tensors: without that, no structure is random, and
    none depends on the tensors that the step before wrote.
    """
    decides = step.branches_at_random = any(step.ranks.gathered(decides or state.draws_random_numbers))
    begins_otherwise = state.changes_attributes or (decides and state.writes_tensors)
    runs: list[Structure] = []
    notes: list[str] = []
    if any(step.ranks.gathered(begins_otherwise)):
        steps = dict(enumerate(_first_steps(step, state, device)))
        difference = _difference_among(step.ranks, steps)
        if difference is not None:
            step.num_steps_before = _largest(step.ranks, steps)
            notes.append(
                f"its first steps differ: {difference}. It is planned for step {1 + step.num_steps_before} of the "
                f"first {len(steps)}, which has the higher peak"
            )
        runs += [*steps.values(), steps[step.num_steps_before]]
    of_seeds: dict[int | None, Structure] = {}
    if decides:
        of_seeds = {seed: _run(step, state, device, seed) for seed in (None, *range(_NUM_FIRST_SEEDS))}
        difference = _difference_among(step.ranks, of_seeds)
        if difference is not None:
            for seed in range(_NUM_FIRST_SEEDS, _NUM_FIRST_SEEDS + _NUM_MORE_SEEDS):
                of_seeds[seed] = _run(step, state, device, seed)
            step.random_seed = _largest(step.ranks, of_seeds)
            notes.append(
                f"its structure is random: {difference}. It is planned for the largest of {len(of_seeds)} runs with "
                "other random numbers"
            )
        runs += [*of_seeds.values(), of_seeds[step.random_seed]]
    if not notes:
        return Variants()
    _warm_up(step, state, of_seeds)
    return Variants(tuple(runs), tuple(notes))


def _warm_up(step: TrainingStep, state: KeptState, runs: Mapping[int | None, Structure]) -> None:
    """Run whole steps that call all that any run calls, so that optimizers have the state that they have in a loop."""
    chosen = step.random_seed
    seeds, missing = [chosen], frozenset().union(*(run.called for run in runs.values()))
    missing -= runs[chosen].called if chosen in runs else missing
    while missing:
        seeds.append(max(runs, key=lambda seed: len(runs[seed].called & missing)))
        missing -= runs[seeds[-1]].called
    # In the same order in all processes, the chosen one last.
    for seed in reversed(list(dict.fromkeys(itertools.chain.from_iterable(step.ranks.gathered(seeds))))):
        step.random_seed = seed
        with state.kept(may_write_more=True):
            step.run()


def _run(step: TrainingStep, state: KeptState, device: torch.device, seed: int | None) -> Structure:
    step.random_seed = seed
    try:
        with state.kept():
            return structure_of_run(step, device, state.run_watched, whole=False)
    finally:
        step.random_seed = None


def _first_steps(step: TrainingStep, state: KeptState, device: torch.device) -> list[Structure]:
    """Run the first steps of a loop, all with the same random numbers: only what they change makes a difference."""
    runs: list[Structure] = []
    step.random_seed = 0
    try:
        with state.kept():
            for number in range(_NUM_STEPS):
                if number:
                    state.begin_next()
                runs.append(structure_of_run(step, device, state.run_watched, whole=True))
    finally:
        step.random_seed = None
    return runs


def _difference_among(ranks: Ranks, runs: Mapping[Any, Structure]) -> str | None:
    """Return what differs among the runs of any process, in words."""
    differences = (one.difference_from(other) for one, other in itertools.pairwise(runs.values()))
    difference = next((each for each in differences if each is not None), None)
    return next((each for each in ranks.gathered(difference) if each is not None), None)


def _largest(ranks: Ranks, runs: Mapping[Any, Structure]) -> Any:
    """Return the run with the highest peak in any process."""
    peaks = ranks.gathered({key: run.peak_bytes for key, run in runs.items()})
    return max(runs, key=lambda key: max(of_rank[key] for of_rank in peaks))
