"""Values are found inside calls of recorded modules: whatever else runs, a plan's peak holds in every step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.runtime.allocation_meter import allocated_peak

WIDTH, NUM_TOKENS = 16, 256


class Block(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), activation
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, make_activation: Callable[[], nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(make_activation()) for _ in range(6))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run_blocks(x)).square().mean()

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Recycling(Stack):
    """Runs its blocks without gradients first, and starts from what they made."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            recycled = self.run_blocks(x)
        return super().forward(x + recycled)


class FreezesHalf(Stack):
    """Runs each block without gradients just before it runs with them."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with torch.no_grad():
                scale = block(x).abs().mean()
            x = block(x * scale)
        return x


class OneBlock(Stack):
    """Runs its only block six times, so that each call has decisions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(nn.GELU())])

    def run_blocks(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = self.blocks[0](x)
        return x


def with_shared_activation() -> Stack:
    activation = nn.GELU()
    return Stack(lambda: activation)


def batch() -> Tensor:
    return torch.randn(NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def peaks_of_steps(
    model: nn.Module, x: Tensor, plan: memfit.Plan, step: Callable[[], None], num_steps: int = 3
) -> list[int]:
    """Return the measured peaks of the first steps by ``plan``, for which the batch ``x`` is there all the time."""
    peaks = []
    with memfit.apply(model, plan):
        for _ in range(num_steps):
            peaks.append(allocated_peak(step, torch.device("cpu"), held=[*model.parameters(), x]))
            model.zero_grad()
    return peaks


MODELS = (with_shared_activation, Recycling, FreezesHalf, OneBlock)


@cache
def points_of(make: Callable[[], nn.Module]) -> tuple[int, tuple[memfit.FrontierPoint, ...]]:
    """Return the plain peak and plans for an average and the least memory, the same for both engines."""
    torch.manual_seed(0)
    profile = memfit.profile(make(), batch())
    return profile.peak_bytes, memfit.frontier(profile, points=3)[1:]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_every_step_keeps_the_budget(make: Callable[[], nn.Module]) -> None:
    plain_peak_bytes, points = points_of(make)
    assert points[-1].peak_bytes < 0.5 * plain_peak_bytes
    model, x = make(), batch()
    for point in points:
        peaks = peaks_of_steps(model, x, point.plan, lambda: model(x).backward())
        assert peaks == [point.peak_bytes] * 3


def test_a_shared_module_is_named_by_the_block_that_calls_it_and_never_recorded_by_itself() -> None:
    model = with_shared_activation()
    profile = memfit.profile(model, batch())
    made_by_gelu = [value.name for value in profile.values if "gelu" in value.name and value.is_saved]
    assert made_by_gelu == [f"blocks.{number}.act::aten.gelu#0" for number in range(6)]
    plan = memfit.plan(
        profile, strategy=memfit.NoCheckpointing(), force_recompute=["blocks.1.act::*", "blocks.4.act::*"]
    )
    assert plan.recorded_modules == ("blocks.1", "blocks.4")
    assert all(not path.endswith("act") for path in plan.hooked_modules)


def test_calls_without_gradients_have_names_and_counts_of_their_own() -> None:
    profile = memfit.profile(Recycling(), batch())
    names = [value.name for value in profile.values if value.name.startswith("blocks.2.act::")]
    assert names == ["blocks.2.act::aten.gelu (no gradients)#0", "blocks.2.act::aten.gelu#0"]
    assert [call.number for call in profile.module_calls if call.path == "blocks.2.act"] == [0]


def test_a_skipped_block_shifts_nothing() -> None:
    class Skipping(Stack):
        skipped = -1

        def run_blocks(self, x: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                if number != self.skipped:
                    x = block(x).tanh()
            return x

    torch.manual_seed(0)
    model, x = Skipping(), batch()
    profile = memfit.profile(model, x)
    plan = memfit.plan(profile, strategy=memfit.NoCheckpointing(), force_recompute=["::*", "blocks.4::*"])
    assert set(plan.recorded_modules) == {"", *(f"blocks.{number}" for number in range(6))}

    all_six = peaks_of_steps(model, x, plan, lambda: model(x).backward(), 1)[0]
    model.skipped = 0
    with pytest.warns(UserWarning, match="aten.tanh ran 5 times .*, and the plan expects 6"):
        one_less = peaks_of_steps(model, x, plan, lambda: model(x).backward(), 1)[0]
    # What block 0 saves and nothing else: its normalized input with its statistics, both sides of the activation, and
    # its output, which the root's tanh is replayed from.
    assert all_six - one_less == 4 * NUM_TOKENS * (WIDTH + 2 + 2 * 4 * WIDTH + WIDTH)


def test_a_block_that_the_last_pass_skipped_drops_its_values_at_once() -> None:
    """Its ops are those of the block that the last pass began with, which saves what this one drops."""

    class Skipping(Stack):
        skipped = -1

        def run_blocks(self, x: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                x = x if number == self.skipped else block(x)
            return x

    torch.manual_seed(0)
    model, x = Skipping(), batch()
    plan = memfit.plan(
        memfit.profile(model, x),
        strategy=memfit.NoCheckpointing(),
        force_recompute=["blocks.0.up::*", "blocks.0.act::*", "blocks.3.norm::*"],
    )
    with memfit.apply(model, plan):
        peaks = []
        for model.skipped in (0, -1, -1, 3, -1):
            peaks.append(
                allocated_peak(lambda: model(x).backward(), torch.device("cpu"), held=[*model.parameters(), x])
            )
            model.zero_grad()
    assert peaks[0] < peaks[1] == peaks[2] == peaks[4] > peaks[3]


def test_each_pass_drops_as_much_as_the_profiled_one() -> None:
    torch.manual_seed(0)
    model, x = Stack(), batch()
    profile = memfit.profile(model, x)
    assert {(call.number, call.num_backward) for call in profile.module_calls} == {(0, 0)}
    plan = memfit.plan(profile, budget=memfit.frontier(profile)[-1].peak_bytes)

    def preference_step() -> None:
        (model(x) - model(x + 1)).backward()

    one = peaks_of_steps(model, x, plan, lambda: model(x).backward())
    twice = peaks_of_steps(model, x, plan, preference_step)
    again = peaks_of_steps(model, x, plan, lambda: model(x).backward())
    assert one == again == [one[0]] * 3
    assert max(twice) < 2 * one[0]
