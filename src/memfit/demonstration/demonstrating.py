"""Measures one small GPT plain, at three budgets and fully checkpointed, and trains it plain and planned."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles

import torch
from torch import nn

from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.demonstration.text import CharacterBatches, generated_text
from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import FrontierPoint, Plan
from memfit.graph.verification import Quartiles
from memfit.models.gpt_model import Gpt
from memfit.planning.planner import frontier
from memfit.planning.planner import plan as plan_step
from memfit.profiling import profile as profile_step
from memfit.progress import Progress
from memfit.units import format_bytes
from memfit.verification.gradients import difference_between
from memfit.verification.methods import Way, checkpointed, plain, planned
from memfit.verification.trials import Trials

SAVED_WHOLE = "saved whole"
CHECKPOINTED = "torch.utils.checkpoint"
# Budgets lie at these shares of the way from the smallest peak to the plain one.
_BUDGET_SHARES = (0.66, 0.33, 0.05)
_NUM_POINTS = 32
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the demo's model and batch are; the usual ones keep the demo under 90 s on two slow cores."""

    layers: int = 6
    width: int = 128
    heads: int = 4
    batch: int = 8
    length: int = 128
    num_training_steps: int = 12


@dataclass(frozen=True, slots=True)
class WayMeasured:
    """One method to run the step; ``overhead`` and its quartiles are against the plain step of the same rounds."""

    label: str
    peak_bytes: int
    step_seconds: float
    overhead: float
    overhead_quartiles: Quartiles
    gradients_equal: bool


@dataclass(frozen=True, slots=True)
class Demonstration:
    """All that the demo found. ``plans`` are by label; losses are those of every training step."""

    profile: ModelProfile
    points: tuple[FrontierPoint, ...]
    plans: Mapping[str, Plan]
    ways: tuple[WayMeasured, ...]
    num_parameters: int
    plain_losses: tuple[float, ...]
    planned_losses: tuple[float, ...]


def demonstrate(sizes: Sizes, progress: Progress) -> Demonstration:
    """Profile, plan, measure and train, on one thread; the same numbers every time, but for those of time."""
    with _one_thread(), torch.random.fork_rng(devices=[]):
        return _demonstrated(sizes, progress)


def _demonstrated(sizes: Sizes, progress: Progress) -> Demonstration:
    batches = CharacterBatches(generated_text(100_000), sizes.batch, sizes.length)
    torch.manual_seed(0)
    model = Gpt(sizes.layers, sizes.width, sizes.heads, sizes.length, len(batches.alphabet), dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = TrainingStep(model, StepArguments(batches.draw(torch.Generator().manual_seed(0)), optimizer=optimizer))
    progress.stage("profiling the plain step")
    profile = profile_step(model, step.batch, optimizer=optimizer)
    progress.stage("planning")
    points = frontier(profile, points=_NUM_POINTS)
    plans = _plans_at_three_budgets(profile, points)
    ways = {SAVED_WHOLE: plain, **{label: planned(plan) for label, plan in plans.items()}}
    ways[CHECKPOINTED] = checkpointed([block.path for block in profile.blocks])
    measured = _measured(step, ways, progress)
    progress.stage("training, plain and planned", num_steps=2 * sizes.num_training_steps)
    smallest = planned(list(plans.values())[-1])
    return Demonstration(
        profile,
        points,
        plans,
        measured,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        plain_losses=_trained(model, plain, batches, sizes.num_training_steps, progress),
        planned_losses=_trained(model, smallest, batches, sizes.num_training_steps, progress),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: on ops this small, several mostly wait, and on a busy machine for very long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _plans_at_three_budgets(profile: ModelProfile, points: Sequence[FrontierPoint]) -> dict[str, Plan]:
    smallest_bytes = points[-1].peak_bytes
    plans = {}
    for share in _BUDGET_SHARES:
        budget_bytes = smallest_bytes + int(share * (profile.peak_bytes - smallest_bytes))
        # Whole MiB, as people give budgets, where those are small beside the step.
        if budget_bytes > 16 * _MIB:
            budget_bytes = -(-budget_bytes // _MIB) * _MIB
        plans[f"memfit at {format_bytes(budget_bytes)}"] = plan_step(profile, budget=budget_bytes)
    return plans


def _measured(step: TrainingStep, ways: Mapping[str, Way], progress: Progress) -> tuple[WayMeasured, ...]:
    trials = Trials(step)
    with trials.kept_optimizer():
        progress.stage("comparing gradients and peaks", num_steps=2 * len(ways))
        runs = []
        for way in ways.values():
            trials.warm_up(way)
            progress.advance()
        for way in ways.values():
            runs.append(trials.measured(way))
            progress.advance()
        seconds = trials.seconds_in_turns(list(ways.values()), progress)
    results = []
    for label, run, own_seconds in zip(ways, runs, seconds, strict=True):
        ratios = [own / plain_seconds - 1 for own, plain_seconds in zip(own_seconds, seconds[0], strict=True)]
        low, _, high = quantiles(ratios, n=4, method="inclusive")
        results.append(
            WayMeasured(
                label=label,
                peak_bytes=run.peak_bytes,
                step_seconds=median(own_seconds),
                overhead=median(own_seconds) / median(seconds[0]) - 1,
                overhead_quartiles=Quartiles(low, high),
                gradients_equal=not difference_between(runs[0].gradients, run.gradients).names,
            )
        )
    return tuple(results)


def _trained(
    model: nn.Module, way: Way, batches: CharacterBatches, num_steps: int, progress: Progress
) -> tuple[float, ...]:
    """Train a copy of ``model`` and return its losses."""
    trained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    torch.manual_seed(1)
    with way(trained):
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = trained(batches.draw(generator))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            progress.advance()
    return tuple(losses)
