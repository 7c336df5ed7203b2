"""Memory with offloading is exact: counted by hand on a chain, and as the simulator says on whole models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tests.engine.offloading_plans import EVERYTHING, plan_by_op
from tests.engine.plans import new_profile_of, unaccounted_bytes
from tests.engine.zoo import BY_NAME
from torch import Tensor, nn

import memfit
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.graph.plan import Decision
from memfit.planning.offload import offloadable
from memfit.planning.simulate.simulator import simulated
from memfit.planning.step import Step
from memfit.planning.step.offload_rules import Offloading
from memfit.runtime.allocation_meter import AllocationMeter
from memfit.verification.methods import Planned
from memfit.verification.trials import Trials

NUM_LINKS = 6
NUM_ELEMENTS = 1000
VALUE_BYTES = 4 * NUM_ELEMENTS


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Chain(nn.Sequential):
    """A hyperbolic tangent after the other. Each saves its own result and nothing else."""

    def __init__(self) -> None:
        super().__init__(Scaled(), *(nn.Tanh() for _ in range(NUM_LINKS)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


class Seen:
    """How many values' worth of memory there is after each link of the chain, forth and back, and at most."""

    def __init__(self) -> None:
        self.forth: list[int] = []
        self.back: list[int] = []
        self._meter = AllocationMeter()

    @property
    def most(self) -> int:
        """Return the peak."""
        return self._in_values(self._meter.peak_bytes)

    @contextmanager
    def recording(self, model: Chain) -> Iterator[None]:
        """Note what lives after each link of the forward pass, and when the gradient of each has been computed."""

        def after_link(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            self.forth.append(self._in_values(self._meter.live_bytes))
            output.register_hook(lambda _: self.back.append(self._in_values(self._meter.live_bytes)))

        hooks = [module.register_forward_hook(after_link) for module in model.children()]
        with self._meter:
            yield
        for hook in hooks:
            hook.remove()

    def _in_values(self, num_bytes: int) -> int:
        # Beside the values there are a few scalars: the loss, its gradient, and that of the scale.
        values, scalars = divmod(num_bytes, VALUE_BYTES)
        assert scalars <= 16
        return values


def seen_in_a_step(window_bytes: int, *, offloads: bool = True) -> Seen:
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(NUM_ELEMENTS)
    plan = plan_by_op(model, x, offload=["aten.tanh"] if offloads else [], window_bytes=window_bytes)
    with memfit.apply(model, plan):
        seen = Seen()
        with seen.recording(model):
            model(x).backward()
    return seen


@pytest.mark.parametrize(
    ("window_bytes", "forth", "back", "most"),
    [
        # While a link computes, its argument and its result are there; what has left is gone at once. In the backward
        # pass a link needs its own result and a gradient, and makes another gradient.
        (0, [1, 2, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1], 3),
        # What is larger than the window goes as if there was none.
        (VALUE_BYTES - 1, [1, 2, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1], 3),
        # The last one that left is still referred to, but it is the argument of the next link anyway. Coming back, a
        # value is started when it is read, and no other fits beside it.
        (VALUE_BYTES, [1, 2, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1], 3),
        # Argument and result are on their way out; coming back, the next one waits to be read, where there is one.
        (2 * VALUE_BYTES, [1, 2, 2, 2, 2, 2, 2], [0, 2, 2, 2, 2, 2, 1], 4),
        (3 * VALUE_BYTES, [1, 2, 2, 3, 3, 3, 3], [0, 3, 3, 3, 3, 2, 1], 5),
        # All stay until the forward pass ends, and come back together, when the first is read.
        (EVERYTHING, [1, 2, 2, 3, 4, 5, 6], [0, 6, 5, 4, 3, 2, 1], 7),
    ],
)
def test_memory_of_a_chain_by_hand(window_bytes: int, forth: list[int], back: list[int], most: int) -> None:
    seen = seen_in_a_step(window_bytes)
    assert (seen.forth, seen.back, seen.most) == (forth, back, most)


def test_what_the_chain_would_hold_without_offloading() -> None:
    seen = seen_in_a_step(0, offloads=False)
    assert (seen.forth, seen.back, seen.most) == ([1, 2, 2, 3, 4, 5, 6], [6, 6, 5, 4, 3, 2, 1], 7)


NAMES = (
    "gpt",
    "gpt-autocast",
    "resnet",
    "transformers-llama",
    "mixture-of-experts",
    "lstm-fp64",
    "noise-and-shuffles",
    "in-place-residuals",
)
NUM_PLANS = 8
# A workspace is measured for an op by itself, and may be larger than within the step by a few numbers or indices.
FEW_BYTES = 64


def has_random_ops(profile: memfit.ModelProfile) -> bool:
    return any(word in op.op for op in profile.ops for word in ("bernoulli", "dropout", "rand"))


@pytest.mark.parametrize("name", NAMES)
def test_measured_peaks_are_the_predicted_ones(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloadable, "SMALLEST_OFFLOADED_BYTES", 1)
    example = BY_NAME[name]
    profile = new_profile_of(example)
    any_plan = memfit.plan(profile, strategy=memfit.NoCheckpointing())
    model, batch, loss = example.build()
    step = Step(profile)
    draw = random.Random(name)
    predicted, measured = [], []
    with example.context():
        trials = Trials(TrainingStep(model, StepArguments(batch, loss)))
        for number in range(NUM_PLANS):
            share = (0.0, 0.3, 0.7)[number % 3]
            recomputed = step.recomputed_of({value for value in step.plannable if draw.random() < share})
            may_leave = offloadable.held_by(step, frozenset(recomputed), offloadable.may_be_offloaded(step))
            offloaded = frozenset(value for value in may_leave if draw.random() < 0.7)
            largest = max((profile.values[value].num_bytes for value in offloaded), default=0)
            offloading = Offloading(offloaded, draw.choice((0, largest, 3 * largest, EVERYTHING)))
            decisions = dict.fromkeys(recomputed, Decision.RECOMPUTE) | dict.fromkeys(offloaded, Decision.OFFLOAD)
            plan = replace(
                any_plan,
                decisions={profile.values[value].name: decisions.get(value, Decision.SAVE) for value in step.plannable},
                recorded_modules=("",),
                hooked_modules=("",),
                window_bytes=offloading.window_bytes,
            )
            predicted.append(simulated(step, recomputed, offloading).peak_bytes)
            measured.append(trials.measured(Planned(plan)).peak_bytes)
    # A prediction holds for the whole step what no op accounts for at the peak of the plain step.
    most_below = unaccounted_bytes(profile) + FEW_BYTES
    # The engine in Python reads the state of a generator as a tensor, which takes memory for a moment.
    most_above = torch.get_rng_state().nbytes if engine == "Python" and has_random_ops(profile) else 0
    for one, other in zip(measured, predicted, strict=True):
        assert other - most_below <= one <= other + most_above
