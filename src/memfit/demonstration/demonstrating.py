"""Measures one small GPT plain, at three budgets and fully checkpointed, and trains it plain and planned."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.demonstration.text import CharacterBatches, generated_text
from memfit.graph.model_profile import ModelProfile
from memfit.graph.plan import FrontierPoint, Plan
from memfit.graph.verification import MethodResult
from memfit.models.gpt_model import Gpt
from memfit.planning.planner import frontier
from memfit.planning.planner import plan as plan_step
from memfit.profiling import profile as profile_step
from memfit.progress import Progress
from memfit.runtime.native.native_build import build_engine
from memfit.units import format_bytes
from memfit.verification.comparing import CHECKPOINTED, PLAIN, measure_methods
from memfit.verification.methods import Method, Planned, checkpointed, plain

# Budgets lie at these shares of the distance from the smallest peak to the plain one.
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
class Demonstration:
    """All that the demo found. ``plans`` are by label; losses are those of every training step."""

    profile: ModelProfile
    points: tuple[FrontierPoint, ...]
    plans: Mapping[str, Plan]
    methods: tuple[MethodResult, ...]
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
    build_engine(progress)
    progress.stage("profiling the plain step")
    profile = profile_step(model, step.batch, optimizer=optimizer)
    progress.stage("planning")
    points = frontier(profile, points=_NUM_POINTS)
    plans = _plans_at_three_budgets(profile, points)
    methods: dict[str, Method] = {PLAIN: plain, **{label: Planned(plan) for label, plan in plans.items()}}
    methods[CHECKPOINTED] = checkpointed([block.path for block in profile.blocks])
    measured = measure_methods(step, methods, progress)
    progress.stage("training, plain and planned", num_steps=2 * sizes.num_training_steps)
    smallest = Planned(list(plans.values())[-1])
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


def _trained(
    model: nn.Module, method: Method, batches: CharacterBatches, num_steps: int, progress: Progress
) -> tuple[float, ...]:
    """Train a copy of ``model`` and return its losses."""
    trained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    torch.manual_seed(1)
    with method(trained):
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = trained(batches.draw(generator))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            progress.advance()
    return tuple(losses)
