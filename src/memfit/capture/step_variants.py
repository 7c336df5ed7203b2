"""Finds steps whose structure is random or changes after the first, and chooses the largest run of them to measure.

A model that skips layers at random runs other ops in each step, and one that sets itself up in its first step runs
others from then on. A plan for the largest run holds for smaller ones too: each block finds its own decisions.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from memfit.capture.recording.recorded_runs import no_garbage_collection
from memfit.capture.recording.structure import Structure, structure_of_run
from memfit.capture.state.kept_state import KeptState
from memfit.capture.training_step import TrainingStep
from memfit.runtime.allocation_meter import allocated_peak

# Enough to notice a layer that is skipped in one step of ten, of four layers or more.
_NUM_FIRST_SEEDS = 3
# Where they differ, so many more: with twelve layers, each skipped in one step of ten, all run in one of four steps.
_NUM_MORE_SEEDS = 20


class Variants(NamedTuple):
    """What was found: ``called`` are the modules that ran in any run, ``notes`` say what differs, in words.

    ``skipped`` are those that did not run in some.
    ``varying`` are the ops, by module and op, that a module calls more often in some runs than in others: their calls
    cannot be told apart by counting.
    """

    called: frozenset[str]
    skipped: frozenset[str]
    notes: tuple[str, ...]
    varying: frozenset[tuple[str, str]]


def random_states() -> tuple[Any, ...]:
    """Return the state of the random number generators that decide in Python: where one changes, it was drawn from."""
    numpy = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state(legacy=False)["state"]
    return random.getstate(), str(state)


def choose_variant(
    step: TrainingStep, state: KeptState, device: torch.device, held: Sequence[torch.Tensor], *, decides: bool
) -> Variants:
    """Set ``step`` to the largest of its runs; ``decides`` is whether Python read random numbers or numbers of tensors.

    Without that, no structure can be random. The next step is looked at where a step changes what later ones read.
    """
    notes: list[str] = []
    called: frozenset[str] = frozenset()
    skipped: frozenset[str] = frozenset()
    varying: frozenset[tuple[str, str]] = frozenset()
    decides = step.branches_at_random = any(step.ranks.gathered(decides))
    if any(step.ranks.gathered(state.changes_between_steps)) and decides:
        notes += _choose_first_or_later(step, state, device, held)
    if decides:
        runs: dict[int | None, Structure] = {None: _structure(step, state, None)}
        for seed in range(1, _NUM_FIRST_SEEDS + 1):
            runs[seed] = _structure(step, state, seed)
        difference = _first_difference(list(runs.values()))
        if step.ranks.agreed(difference) is not None:
            for seed in range(_NUM_FIRST_SEEDS + 1, _NUM_FIRST_SEEDS + _NUM_MORE_SEEDS + 1):
                runs[seed] = _structure(step, state, seed)
            step.random_seed = step.ranks.agreed(max(runs, key=lambda seed: runs[seed].size))
            notes.append(
                f"its structure is random: {difference}. It is planned for the largest of {len(runs)} runs with other "
                "random numbers"
            )
        called = frozenset().union(*(run.called for run in runs.values()))
        skipped = called - frozenset.intersection(*(run.called for run in runs.values()))
        chosen = runs[step.random_seed]
        varying = frozenset().union(*(chosen.varying_ops(run) for run in runs.values()))
    return Variants(called, skipped, tuple(notes), varying)


def _structure(step: TrainingStep, state: KeptState, seed: int | None) -> Structure:
    step.random_seed = seed
    try:
        # Looking for writes changes which ops run, so that it takes a run of its own.
        with state.kept(may_write_more=True):
            step.run()
        with state.kept():
            return structure_of_run(step)
    finally:
        step.random_seed = None


def _first_difference(runs: Sequence[Structure]) -> str | None:
    differences = (one.difference_from(other) for one, other in itertools.pairwise(runs))
    return next((difference for difference in differences if difference is not None), None)


def _choose_first_or_later(
    step: TrainingStep, state: KeptState, device: torch.device, held: Sequence[torch.Tensor]
) -> list[str]:
    """Let the second step be measured where it differs from the first and needs as much; return what differs."""
    structures: list[Structure] = []
    for num_steps_before in (0, 1):
        step.num_steps_before = num_steps_before
        # The same random numbers in both, so that only what the first step left makes a difference.
        structures.append(_structure(step, state, 0))
    difference = step.ranks.agreed(_first_difference(structures))
    if difference is None:
        step.num_steps_before = 0
        return []
    peaks = []
    for num_steps_before in (0, 1):
        step.num_steps_before = num_steps_before
        with state.kept(), no_garbage_collection():
            peaks.append(allocated_peak(step.run, device, held=held))
    step.num_steps_before = step.ranks.agreed(int(peaks[1] >= peaks[0]))
    planned = "later steps, which need" if step.num_steps_before else "the first step, which needs"
    return [f"its first step differs from later ones: {difference}. It is planned for {planned} more memory"]
