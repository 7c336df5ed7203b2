"""Steps whose structure is random, or differs in the first steps: found, named, planned for the largest, put back."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from tests.loop_peaks import peaks_of_steps
from torch import Tensor, nn

import memfit
from memfit.capture.real_step import capture_real_step
from memfit.capture.state.kept_state import KeptState
from memfit.capture.step_arguments import StepArguments
from memfit.capture.training_step import TrainingStep
from memfit.runtime.applying.apply import Applied
from memfit.runtime.engine.forward_pass import ForwardPass
from memfit.runtime.engine.native_tape import new_tape
from memfit.runtime.engine.tape import Tape

WIDTH, NUM_TOKENS, NUM_BLOCKS = 16, 128, 4
ENGINES = pytest.mark.parametrize("make_tape", [new_tape, Tape], ids=["C++", "Python"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm1d(WIDTH), nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.norm(x))))


class LayerDrop(nn.Module):
    """Skips each block half of the time, as ``draw()`` says."""

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.draw() > 0.5:
                x = x + block(x)
        return self.head(x).square().mean()


class StochasticDepth(LayerDrop):
    """Enters each block, and leaves it at once half of the time."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda *_: None)
            block.forward = self._depth(block, block.forward)  # type: ignore[method-assign]

    def _depth(self, block: nn.Module, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: x * 0.5 if torch.rand(()) < 0.5 else x + forward(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class RandomRepeats(nn.Module):
    """Runs an op of the model itself one to four times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(random.randint(1, 4)):
            x = x.tanh() * x
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


class RandomLength(RandomRepeats):
    """Keeps a random number of tokens, by the same ops."""

    def forward(self, x: Tensor) -> Tensor:
        x = x[: random.randint(16, NUM_TOKENS)]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def own_generator() -> LayerDrop:
    generator = random.Random(3)
    model = LayerDrop(generator.random)
    model.generator = generator
    return model


def own_numpy_generator() -> LayerDrop:
    generator = np.random.default_rng(3)
    model = LayerDrop(generator.random)
    model.generator = generator
    return model


def own_torch_generator() -> LayerDrop:
    generator = torch.Generator().manual_seed(3)
    model = LayerDrop(lambda: torch.rand((), generator=generator).item())
    model.generator = generator
    return model


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "python": LayerDrop,
    "numpy": lambda: LayerDrop(np.random.rand),
    "torch": lambda: LayerDrop(lambda: torch.rand(()).item()),
    "stochastic depth": StochasticDepth,
    "repeats": RandomRepeats,
    "length": RandomLength,
    "own generator": own_generator,
    "own generator of NumPy": own_numpy_generator,
    "own generator of torch": own_torch_generator,
}


class SetsItselfUp(LayerDrop):
    """In the first step, what the blocks make is also normalized by statistics that later steps know."""

    def __init__(self) -> None:
        super().__init__(lambda: 1.0)
        self.is_set_up = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            made = block(x)
            if not self.is_set_up:
                made = made * torch.sigmoid(made) * torch.tanh(made)
            x = x + made
        self.is_set_up = True
        return self.head(x).square().mean()


class SetsTensorUp(SetsItselfUp):
    """Knows by a buffer whether it is set up, and does more from then on."""

    def __init__(self) -> None:
        super().__init__()
        del self.is_set_up
        self.register_buffer("num_steps", torch.zeros(()))

    @property
    def is_set_up(self) -> bool:
        return self.num_steps.item() == 0

    @is_set_up.setter
    def is_set_up(self, value: bool) -> None:
        if "num_steps" in self._buffers:
            self.num_steps += 1

    @is_set_up.deleter
    def is_set_up(self) -> None:
        pass


CHANGING: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "first step": (SetsItselfUp, 0),
    "later steps": (SetsTensorUp, 1),
}


def batch() -> Tensor:
    return torch.randn(NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


@cache
def planned(make: Callable[[], nn.Module]) -> tuple[memfit.ModelProfile, memfit.FrontierPoint]:
    """Return the profile of a model, with the one note that it was warned of, and a plan for a small budget."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        profile = memfit.profile(make(), batch())
    (note,) = profile.notes
    (warned,) = caught
    assert str(warned.message).endswith(f": {note}")
    return profile, memfit.frontier(profile, points=3)[-1]


def assert_steps_keep_the_budget(
    make: Callable[[], nn.Module], make_tape: Callable[[], ForwardPass], num_steps: int
) -> None:
    profile, point = planned(make)
    assert point.peak_bytes < 0.9 * profile.peak_bytes
    assert_steps_are_as_planned(make(), point, make_tape, num_steps)


def assert_steps_are_as_planned(
    model: nn.Module, point: memfit.FrontierPoint, make_tape: Callable[[], ForwardPass], num_steps: int
) -> None:
    with Applied(model, point.plan, make_tape):
        peaks = peaks_of_steps(model, batch(), lambda output: output, num_steps=num_steps)
    assert max(peaks) <= 1.005 * point.peak_bytes


@ENGINES
@pytest.mark.parametrize("name", RANDOM)
def test_plans_for_random_structures_hold_in_every_step(name: str, make_tape: Callable[[], ForwardPass]) -> None:
    assert_steps_keep_the_budget(RANDOM[name], make_tape, num_steps=12)


@ENGINES
@pytest.mark.parametrize("module_entry", [0.0, 1e-3])
def test_modules_that_are_skipped_are_recorded_by_themselves_whatever_entering_them_costs(
    module_entry: float, make_tape: Callable[[], ForwardPass]
) -> None:
    profile, _ = planned(StochasticDepth)
    assert profile.skipped_modules == tuple(
        f"blocks.{number}.{name}" for number in range(NUM_BLOCKS) for name in ("act", "down", "norm", "up")
    )
    assert profile.host is not None
    profile = replace(profile, host=replace(profile.host, module_entry=module_entry))
    point = memfit.frontier(profile, points=3)[-1]
    assert_steps_are_as_planned(StochasticDepth(), point, make_tape, num_steps=6)


def test_the_note_names_the_block_and_what_is_planned() -> None:
    profile, _ = planned(LayerDrop)
    (note,) = profile.notes
    assert note.startswith("its structure is random: blocks.")
    assert "is called in some runs and skipped in others. It is planned for the largest of 24 runs" in note
    assert note in repr(profile)
    assert len(profile.blocks) >= NUM_BLOCKS - 1


@ENGINES
@pytest.mark.parametrize("name", CHANGING)
def test_plans_for_first_steps_that_differ_hold_in_every_step(name: str, make_tape: Callable[[], ForwardPass]) -> None:
    make, num_before = CHANGING[name]
    assert_steps_keep_the_budget(make, make_tape, num_steps=4)
    (note,) = planned(make)[0].notes
    assert note.startswith("its first steps differ: aten.")
    assert note.endswith(f"It is planned for step {1 + num_before} of the first 2, which has the higher peak")


@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize("name", [*RANDOM, *CHANGING])
def test_looking_at_other_runs_changes_nothing(name: str, with_optimizer: bool) -> None:
    torch.manual_seed(0)
    random.seed(4)
    model = RANDOM[name]() if name in RANDOM else CHANGING[name][0]()
    optimizer = torch.optim.AdamW(model.parameters()) if with_optimizer else None
    state = copy.deepcopy(model.state_dict())
    attributes = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    generators = (torch.get_rng_state(), str(random.getstate()), str(np.random.get_state()))
    with pytest.warns(UserWarning, match="It is planned for"):
        memfit.profile(model, batch(), optimizer=optimizer)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert {key: value for key, value in vars(model).items() if not key.startswith("_")} == attributes
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (str(random.getstate()), str(np.random.get_state())) == generators[1:]
    if hasattr(model, "generator"):
        assert model.draw() == RANDOM[name]().draw()
    assert optimizer is None or not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


class CountsSteps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


def test_ordinary_steps_are_not_run_more_often() -> None:
    num_runs = 0

    def count(*_: object) -> None:
        nonlocal num_runs
        num_runs += 1

    torch.manual_seed(0)
    model = CountsSteps()
    optimizer = torch.optim.AdamW(model.parameters())
    step = TrainingStep(model, StepArguments(batch(), optimizer=optimizer))
    state = KeptState(step)
    # What a hook of the model keeps would be put back after each run.
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: count() if module is model.linear else None
    )
    with hook, state.kept_optimizer():
        captured = capture_real_step(step, state)
    assert captured.profile.notes == ()
    # It warms up, is recorded, and measured: its peak, four times synchronized, and op by op.
    assert num_runs == 1 + 1 + 1 + 4 + 1


def test_other_random_numbers_take_forward_passes_only() -> None:
    torch.manual_seed(0)
    random.seed(0)
    model = LayerDrop(lambda: random.random() * 0.6)
    step = TrainingStep(model, StepArguments(batch()))
    state = KeptState(step)
    num_runs = {"forward": 0, "backward": 0}

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        if module is model.head:
            num_runs["forward"] += 1
            if output.requires_grad:
                output.register_hook(lambda _: num_runs.update(backward=num_runs["backward"] + 1))

    hook = torch.nn.modules.module.register_module_forward_hook(count)
    with hook, state.kept_optimizer(), pytest.warns(UserWarning, match="its structure is random"):
        capture_real_step(step, state)
    # Beside the runs of an ordinary step, its first two steps are looked at, it warms up for each block at most, and is
    # recorded anew.
    assert num_runs["backward"] <= (1 + 1 + 1 + 4 + 1) + 2 + NUM_BLOCKS + 1
    assert num_runs["forward"] == num_runs["backward"] + 24


def test_a_step_function_is_run_as_a_whole_and_weights_that_only_other_runs_step_are_put_back() -> None:
    torch.manual_seed(0)
    random.seed(4)
    model = LayerDrop()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = copy.deepcopy(model.state_dict())

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    with pytest.warns(UserWarning, match="its structure is random: blocks"):
        profile = memfit.profile(model, batch(), step=step)
    assert len(profile.blocks) >= NUM_BLOCKS - 1
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


@ENGINES
def test_a_step_that_skips_no_block_keeps_the_budget_with_its_optimizers_state(
    make_tape: Callable[[], ForwardPass],
) -> None:
    torch.manual_seed(0)
    random.seed(0)
    model = LayerDrop(lambda: random.random() * 0.6)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="its structure is random"):
        profile = memfit.profile(model, batch(), optimizer=optimizer)
    assert len(profile.blocks) < NUM_BLOCKS
    point = memfit.frontier(profile, points=2)[-1]
    model.draw = lambda: 1.0
    with Applied(model, point.plan, make_tape):
        peaks = peaks_of_steps(model, batch(), lambda output: output, optimizer=optimizer)
    assert max(peaks) <= 1.005 * point.peak_bytes


def test_fit_warns_once_and_names_the_block() -> None:
    torch.manual_seed(0)
    random.seed(0)
    model = LayerDrop()
    profile, point = planned(LayerDrop)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = memfit.fit(model, batch(), budget=round(0.5 * (profile.peak_bytes + point.peak_bytes)))
    (text,) = [str(each.message) for each in caught]
    assert text.startswith("of the step of this LayerDrop: its structure is random: blocks.")
    assert fitted.verification.within_budget
