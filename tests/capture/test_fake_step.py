"""Profiles made with fake tensors: the same ops, values and peak as the real ones, and no memory taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.capture.tensor_peaks import described_ops, described_values, peak_of_tensors
from tests.engine.plans import profile_of
from tests.engine.step_comparison import assert_same, leaves, look
from tests.engine.zoo import BY_NAME, ZOO, Example
from torch import Tensor, nn

import memfit
from memfit import MemfitError, ModelProfile

# They look at numbers (item, nonzero), hand memory to NumPy, or use what fake tensors cannot.
REFUSED = {
    "early-exit",
    "function-with-foreign-kernel",
    "jagged-batch",
    "losses",
    "lstm-packed-sequences",
    "masks-and-scans",
    "mixture-of-experts",
    "mixture-of-experts-fp64",
    "raw-kernel-writes-output",
    "sparse-graph",
    "tensor-hooks",
    "transformers-mixtral",
}
OTHER_PEAK = {
    # Constants and results of index ops of a few bytes are counted a little differently.
    "closure-mutated-after-use",
    "sort-and-scatter",
    "transformers-t5",
    # The real profile is of the second step, which finds what the first one left in a cache.
    "growing-cache",
    "preallocated-cache",
    # A fake torch.cond takes more than the branch that is run, and no layer is dropped at random.
    "conditional",
    "stochastic-depth",
    # For tensor subclasses, and under modes, torch chooses other ops: the reference ops in the place of oneDNN's LSTM,
    # a bias added out of place, derivatives of `prod` and `matrix_exp` without a look at numbers or writes in place.
    "lstm",
    "orthogonal-weights",
    "shapes-and-views",
}

OF_THE_SAME_OPS = (
    "gpt",
    "gpt-autocast",
    "resnet",
    "in-place-residuals",
    "tied-autoencoder",
    # Biases are added in place to products of inputs that are not contiguous.
    "elman-rnn",
    "torch-attention-with-weights",
    "torch-encoder-post-norm",
)

# torch.distributions looks at its arguments, until torch.compile first runs in the process and turns that off.
EITHER = {"reparametrised-sampling", "samples"}


def fake_profile_of(example: Example) -> ModelProfile:
    model, batch, loss = example.build()
    with example.context():
        return memfit.profile(model, batch, loss=loss, mode="fake")


@pytest.mark.parametrize("example", [e for e in ZOO if e.name not in REFUSED | OTHER_PEAK | EITHER], ids=str)
def test_peak_is_the_one_measured_on_the_real_step(example: Example) -> None:
    assert fake_profile_of(example).peak_bytes == peak_of_tensors(profile_of(example))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_step_that_needs_numbers_is_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(MemfitError, match="use mode='real'"):
        fake_profile_of(BY_NAME[name])


@pytest.mark.parametrize("name", OF_THE_SAME_OPS)
def test_ops_and_values_are_those_of_the_real_step(name: str) -> None:
    real, fake = profile_of(BY_NAME[name]), fake_profile_of(BY_NAME[name])
    assert described_ops(fake) == described_ops(real)
    assert described_values(fake) == described_values(real)
    assert fake.blocks == real.blocks
    assert fake.fingerprint == real.fingerprint


def test_profile_says_how_it_was_measured() -> None:
    assert profile_of(BY_NAME["gpt"]).measured_with == "real step"
    assert fake_profile_of(BY_NAME["gpt"]).measured_with == "fake tensors and a roofline of the device"


def test_estimated_seconds_grow_with_the_work() -> None:
    profile = memfit.profile(
        nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 512)), torch.ones(256, 64), mode="fake"
    )
    small, pointwise, large = (op.seconds for op in profile.ops[:3])
    assert pointwise > 0
    assert 0 < small < large
    assert profile.step_seconds == pytest.approx(sum(op.seconds for op in profile.ops))


class Wide(nn.Module):
    """Six layers of 40 GB of weights each, which no test machine holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(100_000, 100_000, bias=False) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_a_model_on_the_meta_device_is_profiled_without_memory() -> None:
    with torch.device("meta"):
        model, batch = Wide(), torch.empty(8, 100_000)
    profile = memfit.profile(model, batch, mode="fake")
    weights_bytes, layer_bytes = 6 * 4 * 10**10, 4 * 8 * 10**5
    # Each layer saves its input: the batch, then six results of relu, of which the last is the output.
    saved_bytes = 7 * layer_bytes
    # At the last weight gradient all of them are there; of the saves, the batch is left.
    assert profile.peak_bytes == 2 * weights_bytes + saved_bytes - 5 * layer_bytes + 2 * 4
    assert len(profile.layers) == 6


def test_a_model_on_the_meta_device_cannot_be_measured_for_real() -> None:
    with pytest.raises(memfit.InvalidParameterError, match="is on the meta device and cannot run; use mode='fake'"):
        memfit.profile(nn.Linear(2, 2, device="meta"), torch.empty(1, 2, device="meta"))


def test_another_mode_is_refused() -> None:
    with pytest.raises(memfit.InvalidParameterError, match="mode is 'real' or 'fake', got 'guess'"):
        memfit.profile(nn.Linear(2, 2), torch.ones(1, 2), mode="guess")


@pytest.mark.parametrize("name", ["gpt", "resnet", "own-generator", "growing-cache", "batch-overwritten"])
def test_fake_profile_leaves_everything_as_it_was(name: str) -> None:
    model, batch, loss = BY_NAME[name].build()
    before = look("it", model, batch) | dict(leaves("weight", dict(model.state_dict())))
    memfit.profile(model, batch, loss=loss, mode="fake")
    assert_same(before, look("it", model, batch) | dict(leaves("weight", dict(model.state_dict()))))


def test_a_fake_profile_leaves_the_parameters_of_the_loss_as_they_were() -> None:
    """Fake tensors take the place of the model's only: those of a teacher are read as they are."""
    model, teacher, batch = nn.Linear(4, 4), nn.Linear(4, 4), torch.ones(2, 4)
    weight = teacher.weight.detach().clone()
    memfit.profile(model, batch, loss=lambda output: (output - teacher(batch)).square().mean(), mode="fake")
    assert torch.equal(teacher.weight, weight)
    assert teacher.weight.grad is None


def test_optimizer_is_counted_and_left_alone() -> None:
    model, batch, loss = BY_NAME["gpt"].build()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    real = memfit.profile(model, batch, loss=loss, optimizer=optimizer)
    fake = memfit.profile(model, batch, loss=loss, optimizer=optimizer, mode="fake")
    assert fake.peak_bytes == peak_of_tensors(real)
    assert described_values(fake) == described_values(real)
    assert not optimizer.state


def trained_optimizer(name: str, model: nn.Module, batch: Tensor, *, foreach: bool, is_used: bool) -> Any:
    """Return an optimizer that has made a step, or none."""
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, foreach=foreach)
    if is_used:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("name", ["Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD"])
def test_optimizers_that_count_steps_in_tensors_can_be_fake(name: str, foreach: bool, is_used: bool) -> None:
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(3, 4)
    optimizer = trained_optimizer(name, model, batch, foreach=foreach, is_used=is_used)
    before = [tensor.clone() for state in optimizer.state.values() for tensor in state.values()]
    fake = memfit.profile(model, batch, optimizer=optimizer, mode="fake")
    real = memfit.profile(model, batch, optimizer=optimizer)
    # Ops over lists are other ops on fake tensors, and one number of theirs is there at the peak.
    assert fake.peak_bytes == peak_of_tensors(real) + (4 if foreach and name != "SGD" else 0)
    after = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after))


def test_a_tensor_in_an_object_of_the_model_is_fake_too() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Linear(4, 4)
            self.holder = SimpleNamespace(shifts=[torch.ones(4)])

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.scale(x) + self.holder.shifts[0])

    model, batch = Holder(), torch.randn(3, 4)
    fake, real = memfit.profile(model, batch, mode="fake"), memfit.profile(model, batch)
    assert fake.peak_bytes == peak_of_tensors(real)
    assert [value.num_bytes for value in fake.values] == [value.num_bytes for value in real.values]


def test_parameters_that_a_module_has_in_a_list_too_are_fake_there() -> None:
    """As nn.LSTM has them: beside fake ones, real ones would have gradients of their own."""

    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lower, self.upper = nn.Linear(64, 64), nn.Linear(64, 64)
            self.weights = [self.upper.weight]

        def forward(self, x: Tensor) -> Tensor:
            return self.upper(torch.tanh(self.lower(x))) @ self.weights[0]

    model, batch = Listing(), torch.randn(3, 64)
    weights = list(model.weights)
    values = described_values(memfit.profile(model, batch, mode="fake"))
    assert model.weights[0] is weights[0] is model.upper.weight
    assert values == described_values(memfit.profile(model, batch))


def test_a_step_may_copy_tensors_deeply() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def step() -> None:
        # As metrics do with their defaults: a number that was made a tensor, and a tensor from before the step.
        copies = copy.deepcopy({"total": torch.tensor(1.0), "weight": model.weight})
        (model(x).sum() * copies["total"] + copies["weight"].sum()).backward()
        assert copies["weight"].grad is not None

    fake, real = memfit.profile(model, step=step, mode="fake"), memfit.profile(model, step=step)
    # A fake copy of a number keeps the number besides.
    assert fake.peak_bytes == peak_of_tensors(real) + torch.float32.itemsize


def accumulating_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    """Return a step that clips the gradients of two passes, and does not let go of the second loss."""

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        for part in batch.chunk(2):
            loss = model(part).square().mean()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()

    return step


class Tied(nn.Module):
    """Two layers share a weight, buffers are written in the forward pass, one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.other.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.norm(self.one(x))))


@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_users_step_has_the_same_ops_and_values_on_fake_tensors(name: str, is_used: bool) -> None:
    torch.manual_seed(0)
    model, batch = Tied(), torch.randn(6, 8)
    optimizer = trained_optimizer(name, model, batch, foreach=False, is_used=is_used)
    step = accumulating_step(model, optimizer)
    real = memfit.profile(model, batch, step=step)
    fake = memfit.profile(model, batch, step=step, mode="fake")
    assert described_ops(fake) == described_ops(real)
    assert described_values(fake) == described_values(real)
    assert fake.peak_bytes == peak_of_tensors(real)


@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
def test_a_users_step_on_fake_tensors_leaves_everything_as_it_was(is_used: bool) -> None:
    torch.manual_seed(0)
    model, batch = Tied(), torch.randn(6, 8)
    optimizer = trained_optimizer("AdamW", model, batch, foreach=False, is_used=is_used)
    gradient = model.one.bias.grad = torch.ones(8)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    contents = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    state, groups = optimizer.state, [list(group["params"]) for group in optimizer.param_groups]
    entries = {parameter: dict(entry) for parameter, entry in state.items()}

    memfit.profile(model, batch, step=accumulating_step(model, optimizer), mode="fake")
    assert_fake_tensors_are_gone(model, optimizer, tensors)

    def failing_step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        raise ValueError("here")

    with pytest.raises(MemfitError, match=r"could not be run on fake tensors \(ValueError: here\); use mode='real'"):
        memfit.profile(model, batch, step=failing_step, mode="fake")
    assert_fake_tensors_are_gone(model, optimizer, tensors)
    assert all(torch.equal(tensor, contents[name]) for name, tensor in tensors.items())
    assert model.one.bias.grad is gradient
    assert torch.equal(gradient, torch.ones(8))
    assert model.one.weight.grad is None
    assert optimizer.state is state
    assert all(
        a is b
        for now, before in zip(optimizer.param_groups, groups, strict=True)
        for a, b in zip(now["params"], before, strict=True)
    )
    assert state.keys() == entries.keys()
    assert all(state[key][name] is entry[name] for key, entry in entries.items() for name in entry)


def assert_fake_tensors_are_gone(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert now.keys() == tensors.keys()
    assert all(now[name] is tensor for name, tensor in tensors.items())
    assert all(type(tensor) is Tensor for entry in optimizer.state.values() for tensor in entry.values())


def test_a_users_step_whose_gradients_are_hooked_is_refused_on_fake_tensors() -> None:
    model, batch = nn.Linear(4, 4), torch.randn(2, 4)
    model.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(MemfitError, match=r"parameters have hooks .* use mode='real'"):
        memfit.profile(model, batch, step=lambda x: model(x).sum().backward(), mode="fake")


def test_compiled_blocks_are_profiled_as_eager_ones_on_fake_tensors() -> None:
    model, batch = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.Tanh()) for _ in range(1))), torch.randn(6, 4)
    eager = memfit.profile(model, batch, mode="fake")
    compiled_call = object()
    model[0]._compiled_call_impl = compiled_call
    assert memfit.profile(model, batch, mode="fake").ops == eager.ops
    assert model[0]._compiled_call_impl is compiled_call


def test_a_users_step_that_knows_its_batch_reads_it_as_a_constant() -> None:
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(6, 4)

    def step() -> None:
        model(batch).sum().backward()

    fake = memfit.profile(model, step=step, mode="fake")
    assert fake.peak_bytes == peak_of_tensors(memfit.profile(model, step=step))
