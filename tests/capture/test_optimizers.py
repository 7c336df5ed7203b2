"""With an optimizer, its step is recorded too, and afterwards it knows of none of the steps that were run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from tests.engine.step_comparison import assert_same, leaves, trace_steps
from tests.engine.zoo import BY_NAME
from torch import Tensor, nn

import memfit
from memfit.capture.recording.plain_timeline import plain_timeline_bytes
from memfit.graph.model_profile import Phase

NewOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def muon(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon([parameter for parameter in parameters if parameter.ndim == 2], lr=0.1)


OPTIMIZERS: dict[str, NewOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    "adamw-foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "adafactor": torch.optim.Adafactor,
    "muon": muon,
    "rmsprop-centered": partial(torch.optim.RMSprop, lr=0.1, centered=True),
}


@pytest.mark.parametrize("new_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_timeline_with_the_optimizers_step_peaks_at_the_measured_peak(new_optimizer: NewOptimizer) -> None:
    model, batch, loss = BY_NAME["gpt"].build()
    profile = memfit.profile(model, batch, loss=loss, optimizer=new_optimizer(model.parameters()))
    assert max(plain_timeline_bytes(profile.ops, profile.values)) == profile.peak_bytes
    assert profile.ops[-1].phase is Phase.OPTIMIZER


def test_state_that_the_first_step_creates_counts_as_there_before() -> None:
    model = nn.Linear(8, 4, bias=False)
    profile = memfit.profile(model, torch.ones(2, 8), optimizer=torch.optim.AdamW(model.parameters(), foreach=False))
    states = [value for value in profile.values if value.name.startswith("optimizer state")]
    # A counter of steps and two moments.
    assert sorted(value.num_bytes for value in states) == [4, 4 * 32, 4 * 32]
    assert all(value.op_index is None and value.dies_after is None for value in states)


@pytest.mark.parametrize("num_steps_before", [0, 2])
@pytest.mark.parametrize("new_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_profile_leaves_weights_and_optimizer_as_they_were(new_optimizer: NewOptimizer, num_steps_before: int) -> None:
    example = BY_NAME["gpt"]
    model, batch, loss = example.build()
    optimizer = new_optimizer(model.parameters())
    for _ in range(num_steps_before):
        loss(model(batch)).backward()
        optimizer.step()
    before = dict(leaves("model", dict(model.state_dict()))) | dict(leaves("optimizer", optimizer.state_dict()))
    num_states = len(optimizer.state)
    memfit.profile(model, batch, loss=loss, optimizer=optimizer)
    after = dict(leaves("model", dict(model.state_dict()))) | dict(leaves("optimizer", optimizer.state_dict()))
    assert_same(before, after)
    assert len(optimizer.state) == num_states


def test_training_goes_on_as_if_there_had_been_no_profile() -> None:
    example = BY_NAME["gpt"]

    def profiled(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        memfit.profile(model, batch, loss=loss, optimizer=optimizer)
        return optimizer

    model, batch, loss = example.build()
    after_profile = trace_steps((model, batch, loss), optimizer=profiled)
    plain = trace_steps(example.build(), optimizer=partial(torch.optim.AdamW, lr=0.01))
    assert_same(plain, after_profile)


def test_a_step_that_raises_leaves_the_optimizer_as_it_was() -> None:
    model, batch, loss = BY_NAME["gpt"].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = dict(leaves("model", dict(model.state_dict())))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    handle = optimizer.register_step_post_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        memfit.profile(model, batch, loss=loss, optimizer=optimizer)
    handle.remove()
    assert not optimizer.state
    assert_same(before, dict(leaves("model", dict(model.state_dict()))))


def test_an_optimizer_that_calls_a_closure_as_often_as_it_likes_is_refused_also_inside_a_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> Tensor:
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    before = dict(model.state_dict())
    for arguments in ({"loss": torch.sum, "optimizer": optimizer}, {"step": lambda _: optimizer.step(closure)}):
        with pytest.raises(memfit.InvalidParameterError, match=r"LBFGS.step\(\) needs a closure"):
            memfit.profile(model, torch.ones(1, 2), **arguments)
    assert not optimizer.state
    assert_same(dict(leaves("model", before)), dict(leaves("model", dict(model.state_dict()))))


def test_a_wrapped_optimizers_state_counts_on_fake_tensors_too() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, batch = nn.Linear(8, 4, bias=False), torch.ones(2, 8)
    wrapper = accelerate.Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters()))
    found = []
    for mode in ("real", "fake"):
        profile = memfit.profile(model, batch, step=lambda x: model(x).sum().backward(), optimizer=wrapper, mode=mode)
        found.append(sum(value.num_bytes for value in profile.values if value.name.startswith("optimizer state")))
    assert found == [4 + 2 * 4 * 32] * 2


def test_an_optimizer_of_another_kind_is_refused() -> None:
    with pytest.raises(memfit.InvalidParameterError, match=r"optimizer is a torch.optim.Optimizer, .* got str"):
        memfit.profile(nn.Linear(2, 2), torch.ones(1, 2), optimizer="adam")
