"""Steps of many kinds, as training loops run them: measured right, and nothing of the user's changed by that."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn import functional

import memfit
from memfit.capture.state.bits import same_bits
from memfit.graph.model_profile import Phase
from memfit.runtime.allocation_meter import allocated_peak


@dataclass
class Setup:
    """A model, its step arguments, the loop that trains it, and all that the step may change."""

    model: nn.Module
    batch: Any
    train: Callable[[], Tensor]
    arguments: dict[str, Any]
    optimizers: list[Any] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)),
        nn.Linear(8, 4),
    )


def rows() -> Tensor:
    return torch.randn(6, 8)


def with_loss(**arguments: Any) -> Setup:
    model, batch = network(), rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train() -> Tensor:
        output = model(batch)
        loss = nn.CrossEntropyLoss()(output, arguments["targets"]) if "targets" in arguments else output.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    given = {"loss": lambda output: output.square().mean(), **arguments, "optimizer": optimizer}
    return Setup(model, batch, train, given, [optimizer])


def plain_loss() -> Setup:
    return with_loss()


def targets() -> Setup:
    return with_loss(loss=nn.CrossEntropyLoss(), targets=torch.tensor([0, 1, 2, 3, 0, 1]))


def stepping(model: nn.Module, step: Callable[[Any], Tensor], *optimizers: Any, others: Any = ()) -> Setup:
    batch = rows()
    return Setup(model, batch, lambda: step(batch), {"step": step}, list(optimizers), list(others))


def scheduler() -> Setup:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    # It refuses a fourth step.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        plateau.step(float(loss.detach()))
        average.update_parameters(model)
        return loss

    return stepping(model, step, optimizer, others=[schedule, plateau, average])


def accumulation() -> Setup:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    num_steps = 0

    def step(batch: Tensor) -> Tensor:
        nonlocal num_steps
        losses = []
        for part in batch.chunk(2):
            loss = model(part).square().mean() / 2
            loss.backward()
            losses.append(loss.detach())
        num_steps += 1
        assert num_steps <= 3
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return stepping(model, step, optimizer)


def gan() -> Setup:
    model = nn.ModuleDict(
        {"generator": network(), "critic": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))}
    )
    first = torch.optim.Adam(model["generator"].parameters())
    second = torch.optim.Adam(model["critic"].parameters())

    def step(batch: Tensor) -> Tensor:
        made = model["generator"](batch)
        second.zero_grad()
        critic_loss = model["critic"](made.detach()).mean() - model["critic"](torch.randn(6, 4)).mean()
        critic_loss.backward()
        second.step()
        first.zero_grad()
        loss = -model["critic"](made).mean()
        loss.backward()
        first.step()
        return loss + critic_loss

    return stepping(model, step, first, second)


def preferences() -> Setup:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Tensor) -> Tensor:
        chosen, rejected = model(batch), model(-batch)
        with torch.no_grad():
            reference = model(batch) - model(-batch)
        loss = -functional.logsigmoid(chosen - rejected - reference).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return stepping(model, step, optimizer)


def autocast_and_scaler() -> Setup:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return stepping(model, step, optimizer, others=[scaler])


def optimizer_in_backward() -> Setup:
    model, batch = network(), rows()
    optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def train() -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    given = {"loss": lambda output: output.square().mean()}
    return Setup(model, batch, train, given, list(optimizers.values()))


class Lookahead:
    """A wrapper of an optimizer whose own weights follow in every second step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.num_steps = 0
        self.weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self.slow = [weight.detach().clone() for weight in self.weights]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for weight, slow in zip(self.weights, self.slow, strict=True):
                weight.copy_(slow.lerp_(weight, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "slow": self.slow}


def wrapped_optimizer() -> Setup:
    model, batch = network(), rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapper = Lookahead(optimizer)

    def train() -> Tensor:
        loss = model(batch).square().mean()
        wrapper.zero_grad()
        loss.backward()
        wrapper.step()
        return loss

    arguments = {"loss": lambda output: output.square().mean(), "optimizer": wrapper}
    return Setup(model, batch, train, arguments, [optimizer, wrapper])


class ByChance(nn.Module):
    """Counts its calls by chance, each second one, and by chance also shrinks its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("counts", torch.zeros(3))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        with torch.no_grad():
            self.counts[0] += self.num_calls % 2 == 0
            if random.random() < 0.3:
                self.counts[1] += 1
            if torch.rand(()).item() < 0.3:
                self.counts[2] += 1
                self.linear.weight.mul_(0.99)
        return nn.functional.gelu(self.linear(x))


def by_chance() -> Setup:
    model, batch = nn.Sequential(*(ByChance() for _ in range(3))), rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    arguments = {"loss": lambda output: output.square().mean(), "optimizer": optimizer}
    return Setup(model, batch, train, arguments, [optimizer])


class Counting(Stateful):
    """A training loop that unfreezes the first layer in its second step, and counts its steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.model = network()
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, batch: Tensor) -> Tensor:
        self.num_steps += 1
        self.model[0].requires_grad_(self.num_steps > 1)
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}


def unfreezing() -> Setup:
    loop = Counting()
    return stepping(loop.model, loop.step, loop.optimizer, others=[loop])


def accelerate_optimizer() -> Setup:
    accelerate = pytest.importorskip("accelerate")
    setup = with_loss()
    prepared = accelerate.Accelerator(cpu=True).prepare(*setup.optimizers)
    return Setup(setup.model, setup.batch, setup.train, {**setup.arguments, "optimizer": prepared}, setup.optimizers)


SETUPS = [
    plain_loss,
    targets,
    scheduler,
    accumulation,
    gan,
    preferences,
    autocast_and_scaler,
    optimizer_in_backward,
    wrapped_optimizer,
    by_chance,
    accelerate_optimizer,
]


def built(make: Callable[[], Setup]) -> Setup:
    torch.manual_seed(0)
    random.seed(0)
    return make()


def flat_state(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [each for name, entry in value.items() for each in (str(name), *flat_state(entry))]
    if isinstance(value, (list, tuple)):
        return [each for entry in value for each in flat_state(entry)]
    return [value.clone() if isinstance(value, Tensor) else value]


def state_of(setup: Setup) -> list[Any]:
    """Return all that a step may change, as a flat list."""
    states = [setup.model.state_dict(), {name: tensor.grad for name, tensor in setup.model.named_parameters()}]
    states += [each.state_dict() for each in setup.optimizers]
    states += [other.state_dict() for other in setup.others]
    states += [getattr(module, "num_calls", None) for module in setup.model.modules()]
    states += [parameter.requires_grad for parameter in setup.model.parameters()]
    return [*flat_state(states), torch.get_rng_state(), str(random.getstate()), str(np.random.get_state())]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(ours, Tensor):
            assert same_bits(ours, theirs)
        elif not isinstance(ours, (str, int, float, bool, type(None))):
            assert ours is theirs
        else:
            assert ours == theirs


def losses_of(setup: Setup, num_steps: int = 2) -> list[float]:
    torch.manual_seed(1)
    random.seed(1)
    return [float(setup.train().detach()) for _ in range(num_steps)]


@pytest.mark.parametrize("make", SETUPS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("trained", [False, True], ids=["at the start", "in training"])
def test_training_is_bit_identical_after_profiling_and_verifying(make: Callable[[], Setup], trained: bool) -> None:
    ours, theirs = built(make), built(make)
    if trained:
        # Gradients and the optimizers' state are there already.
        assert losses_of(ours, num_steps=1) == losses_of(theirs, num_steps=1)
    before = state_of(ours)
    profile = memfit.profile(ours.model, ours.batch, **ours.arguments)
    assert_same(state_of(ours), before)
    verification = memfit.verify(ours.model, memfit.plan(profile, strategy=memfit.Full()), ours.batch, **ours.arguments)
    assert_same(state_of(ours), before)
    assert verification.gradients_equal is True
    assert verification.plain_peak_bytes == profile.peak_bytes
    assert verification.num_gradients is not None
    assert verification.num_gradients >= sum(1 for _ in ours.model.parameters())
    assert losses_of(ours) == losses_of(theirs)
    assert_same(state_of(ours), state_of(theirs))


def test_parameters_that_a_step_unfreezes_are_frozen_again_and_its_loop_of_a_torch_protocol_counts_on() -> None:
    ours, theirs = built(unfreezing), built(unfreezing)
    before = state_of(ours)
    with pytest.warns(UserWarning, match="its first steps differ"):
        profile = memfit.profile(ours.model, ours.batch, **ours.arguments)
    memfit.verify(ours.model, memfit.plan(profile, strategy=memfit.Full()), ours.batch, **ours.arguments)
    assert_same(state_of(ours), before)
    assert losses_of(ours) == losses_of(theirs)
    assert_same(state_of(ours), state_of(theirs))


def test_what_other_steps_leave_counts_where_every_second_step_trains_a_generator_too() -> None:
    model = nn.ModuleDict({"generator": network(), "critic": nn.Linear(4, 1)})
    first, second = (torch.optim.Adam(part.parameters()) for part in model.children())
    batch, num_steps = torch.randn(64, 8), itertools.count()

    def step(batch: Tensor) -> None:
        second.zero_grad()
        # More rows than the generator has when it is trained: the first step is the larger one.
        (model["critic"](model["generator"](batch.repeat(4, 1)).detach())).mean().backward()
        second.step()
        if next(num_steps) % 2:
            first.zero_grad()
            model["critic"](model["generator"](batch)).mean().backward()
            first.step()

    with pytest.warns(UserWarning, match="its first steps differ"):
        profile = memfit.profile(model, batch, step=step)

    def held() -> Iterator[Tensor]:
        yield from (*model.parameters(), *model.buffers(), batch)
        yield from (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        yield from (entry for each in (first, second) for state in each.state.values() for entry in state.values())

    peaks = [allocated_peak(lambda: step(batch), torch.device("cpu"), held()) for _ in range(4)]
    assert profile.peak_bytes == max(peaks)


def test_phases_are_those_of_what_runs() -> None:
    setup = built(accumulation)
    profile = memfit.profile(setup.model, setup.batch, **setup.arguments)
    phases = [op.phase for op in profile.ops]
    runs = [phase for number, phase in enumerate(phases) if number == 0 or phases[number - 1] is not phase]
    # The loss of each part is divided and stacked after its backward pass began: that is the forward phase again.
    assert [phase for phase in runs if phase is not Phase.FORWARD] == [Phase.BACKWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    in_hooks = built(optimizer_in_backward)
    profile = memfit.profile(in_hooks.model, in_hooks.batch, **in_hooks.arguments)
    first_step = next(number for number, op in enumerate(profile.ops) if op.phase is Phase.OPTIMIZER)
    assert any(op.phase is Phase.BACKWARD for op in profile.ops[first_step:])


def test_values_of_each_part_of_a_batch_live_until_its_own_backward_pass() -> None:
    setup = built(accumulation)
    profile = memfit.profile(setup.model, setup.batch, **setup.arguments)
    starts = [
        number
        for number, op in enumerate(profile.ops)
        if op.op == "aten.addmm" and op.module == "0.0" and op.phase is Phase.FORWARD
    ]
    assert len(starts) == 2
    first = [value for value in profile.values if value.saves and value.op_index is not None]
    early = [value for value in first if value.op_index is not None and value.op_index < starts[1]]
    assert early
    assert all(save.released_after < starts[1] for value in early for save in value.saves)


def test_a_step_that_is_accumulated_can_be_fitted() -> None:
    setup = built(accumulation)
    setup.batch = torch.randn(512, 8)
    profile = memfit.profile(setup.model, setup.batch, **setup.arguments)
    smallest = memfit.plan(profile, strategy=memfit.Full()).predicted_peak_bytes
    assert smallest < profile.peak_bytes
    # No budget that checkpointing of every block keeps is refused.
    assert memfit.plan(profile, budget=smallest).predicted_peak_bytes <= smallest
    fitted = memfit.fit(setup.model, setup.batch, budget=(smallest + profile.peak_bytes) // 2, **setup.arguments)
    assert fitted.verification.holds
    fitted.remove()


def test_a_verification_that_compares_no_gradient_is_an_error() -> None:
    model = network()

    def step(batch: Tensor) -> None:
        model(batch).sum().backward()
        model.zero_grad()

    plan = memfit.plan(memfit.profile(model, rows(), step=step), strategy=memfit.Full())
    with pytest.raises(memfit.VerificationError, match=r"no gradient was compared: .* every gradient is None"):
        memfit.verify(model, plan, rows(), step=step)


def test_gradients_that_are_kept_are_counted_from_the_start() -> None:
    model, batch = network(), rows()
    fresh, kept = (memfit.profile(model, batch, loss=torch.sum, gradients=gradients) for gradients in ("fresh", "kept"))
    gradient_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    named = {value.name: value for value in kept.values if value.name.endswith(".grad")}
    assert sum(value.num_bytes for value in named.values()) == gradient_bytes
    assert all(value.op_index is None for value in named.values())
    assert kept.peak_bytes > fresh.peak_bytes
    assert all(parameter.grad is None for parameter in model.parameters())
    verification = memfit.verify(
        model, memfit.plan(kept, strategy=memfit.Full()), batch, loss=torch.sum, gradients="kept"
    )
    assert verification.gradients_equal is True
    assert verification.plain_peak_bytes == kept.peak_bytes


def test_what_hooks_keep_is_put_back() -> None:
    model, seen = network(), []
    model[0].register_forward_pre_hook(lambda *_: seen.append("forward pre"))
    model[1].register_forward_hook(lambda *_: seen.append("forward"))
    model[1].register_full_backward_pre_hook(lambda *_: seen.append("backward pre"))
    model[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    model[3].weight.register_hook(lambda _: seen.append("weight"))
    memfit.profile(model, rows(), loss=torch.sum)
    assert seen == []


class Drawing:
    """A loop that draws its batches in its step."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.model = network()
        self.batches = batches

    def step(self) -> None:
        self.model(next(self.batches)).sum().backward()


ITERATORS: dict[str, Callable[[list[Tensor]], Iterator[Any]]] = {
    "generator": lambda batches: (batch for batch in batches),
    "map": lambda batches: map(torch.neg, batches),
    "zip": lambda batches: zip(batches, batches, strict=True),
    "enumerate": enumerate,
    "cycle": itertools.cycle,
    "_SingleProcessDataLoaderIter": lambda batches: iter(torch.utils.data.DataLoader(batches)),
}


@pytest.mark.parametrize("kind", ITERATORS)
@pytest.mark.parametrize("is_attribute", [False, True], ids=["variable", "attribute"])
def test_a_step_that_draws_from_what_cannot_be_put_back_is_refused_before_it_runs(
    kind: str, is_attribute: bool
) -> None:
    model, batches = network(), ITERATORS[kind]([rows() for _ in range(9)])

    def step() -> None:
        raise AssertionError(f"nothing may be drawn from {batches}")

    loop = Drawing(batches)
    with pytest.raises(memfit.InvalidParameterError, match=f"refers to an? {kind}, which cannot be put back"):
        memfit.profile(loop.model if is_attribute else model, step=loop.step if is_attribute else step)


def test_iterators_of_lists_and_counts_are_put_back() -> None:
    model, batches = network(), [torch.full((6, 8), float(number)) for number in range(9)]
    drawn, count, held = iter(batches), itertools.count(3), {"batches": iter(tuple(batches))}
    loop = Drawing(iter(batches))

    def step() -> None:
        next(count)
        loop.step()
        model(next(drawn) + next(held["batches"])).sum().backward()

    memfit.profile(model, step=step)
    assert next(count) == 3
    assert all(next(each) is batches[0] for each in (drawn, held["batches"], loop.batches))
