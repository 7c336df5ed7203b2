"""Steps with several forward passes: gradient accumulation, two networks in one module, parts that are called directly.

The engine numbers calls anew in each pass, so that alike values of several passes share a decision. Predicted peaks
must be those of such plans.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from tests.engine.test_addresses import peaks_of_steps
from torch import Tensor, nn
from torch.nn.functional import softplus

import memfit

WIDTH, NUM_ROWS = 8, 32


class Setup(NamedTuple):
    model: nn.Module
    batch: Tensor
    step: Callable[[Tensor], object]


def mlp(num_blocks: int = 2) -> nn.Sequential:
    return nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH), nn.Tanh())
            for _ in range(num_blocks)
        )
    )


def rows(number: int = NUM_ROWS) -> Tensor:
    return torch.randn(number, WIDTH)


def accumulation() -> Setup:
    model = mlp()

    def step(batch: Tensor) -> None:
        for x in batch.split([16, 48, 32]):
            model(x).square().mean().backward()

    return Setup(model, rows(96), step)


def adversarial() -> Setup:
    model = nn.ModuleDict({"generator": mlp(), "critic": nn.Sequential(mlp(), nn.Linear(WIDTH, 1))})
    generator, critic = model["generator"], model["critic"]

    def step(real: Tensor) -> None:
        fake = generator(real.flip(0))
        (softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()).backward()
        softplus(-critic(fake)).mean().backward()

    return Setup(model, rows(), step)


def gradient_penalty() -> Setup:
    model = mlp(3)

    def step(x: Tensor) -> None:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (gradient.norm(dim=1).mean() + model(x.detach()).square().mean()).backward()
        model(x.detach()).sum().backward()

    return Setup(model, rows(), step)


def preferences() -> Setup:
    both = nn.ModuleList([mlp(3), mlp(3).requires_grad_(False)])
    model, reference = both

    def step(batch: Tensor) -> None:
        for chosen, rejected in zip(batch[:32].chunk(2), batch[32:].chunk(2), strict=True):
            with torch.no_grad():
                margin = reference(chosen).mean() - reference(rejected).mean()
            softplus(margin - model(chosen).mean() + model(rejected).mean()).backward()

    return Setup(both, rows(56), step)


def truncated_time() -> Setup:
    model = mlp(1)

    def step(x: Tensor) -> None:
        state = torch.zeros_like(x)
        for _ in range(2):
            state = state.detach()
            for _ in range(3):
                state = model(state + x)
            state.square().mean().backward()

    return Setup(model, rows(), step)


def blocks_called_directly() -> Setup:
    model = nn.ModuleDict({"blocks": mlp(3), "head": nn.Linear(WIDTH, 1)})

    def step(x: Tensor) -> None:
        for block in model["blocks"]:
            x = block(x)
        model["head"](x).mean().backward()

    return Setup(model, rows(), step)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.other = mlp(), mlp(1)

    def forward(self, x: Tensor, *, other: bool) -> Tensor:
        x = self.trunk(x)
        # What the trunk ends with is saved for one of the passes only.
        return self.other(nn.functional.gelu(x).exp()) if other else x


def passes_that_differ() -> Setup:
    model = TwoOutputs()

    def step(x: Tensor) -> None:
        model(x, other=False).square().mean().backward()
        model(x, other=True).mean().backward()

    return Setup(model, rows(), step)


SETUPS = (
    accumulation,
    adversarial,
    gradient_penalty,
    preferences,
    truncated_time,
    blocks_called_directly,
    passes_that_differ,
)


def gradients_of(setup: Setup) -> list[Tensor | None]:
    setup.step(setup.batch)
    gradients = [parameter.grad for parameter in setup.model.parameters()]
    setup.model.zero_grad()
    return gradients


def drawn_plans(profile: memfit.ModelProfile) -> list[memfit.Plan]:
    everything = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["*"])
    names = [name for name, decision in everything.decisions.items() if decision == "recompute"]
    draw = random.Random(3)
    return [
        memfit.plan(
            profile,
            strategy=memfit.NoCheckpointing(),
            force_recompute=[name for name in names if draw.random() < share],
        )
        for share in (0.1, 0.3, 1.0)
    ]


@pytest.mark.parametrize("make", SETUPS, ids=lambda make: make.__name__)
def test_peaks_are_the_predicted_ones_in_every_step(make: Callable[[], Setup]) -> None:
    torch.manual_seed(0)
    setup = make()
    profile = memfit.profile(setup.model, setup.batch, step=setup.step)
    plain = gradients_of(setup)
    plans = [point.plan for point in memfit.frontier(profile, points=4)[1:]]
    assert plans
    for plan in [*plans, *drawn_plans(profile)]:
        peaks = peaks_of_steps(setup.model, setup.batch, plan, lambda: setup.step(setup.batch))
        assert peaks == [plan.predicted_peak_bytes] * 3
        with memfit.apply(setup.model, plan):
            assert all(map(equal, gradients_of(setup), plain))


def equal(gradient: Tensor | None, other: Tensor | None) -> bool:
    return gradient is other if gradient is None or other is None else torch.equal(gradient, other)


def test_alike_values_of_several_passes_share_a_decision() -> None:
    torch.manual_seed(0)
    setup = accumulation()
    profile = memfit.profile(setup.model, setup.batch, step=setup.step)
    first = "0.1::aten.addmm#0"
    plan = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=[first])
    recomputed = [name for name, decision in plan.decisions.items() if decision == "recompute"]
    assert recomputed == [first, "0.1::aten.addmm#1", "0.1::aten.addmm#2"]
    plan = memfit.plan(profile, strategy=memfit.Full(), force_save=["0.2::aten.gelu#1"])
    assert {plan.decisions[f"0.2::aten.gelu#{number}"] for number in range(3)} == {memfit.Decision.SAVE}


def test_what_a_later_pass_reads_is_saved() -> None:
    torch.manual_seed(0)
    setup = blocks_called_directly()
    profile = memfit.profile(setup.model, setup.batch, step=setup.step)
    with pytest.warns(UserWarning, match="a later forward pass reads it"):
        memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["blocks.0.4::*"])
