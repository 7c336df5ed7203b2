"""Logits of a model with a chunked loss: right whenever somebody reads them, and never computed where nobody does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.errors import InvalidParameterError, StaleValueError
from memfit.runtime.chunked_loss.language_model_head import head_of, loss_in_chunks
from memfit.runtime.chunked_loss.lazy_logits import LazyLogits

NUM_CLASSES = 13


class TinyModel(nn.Module):
    """A language model without a body."""

    def __init__(self, *, bias: bool = False, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_CLASSES, 8)
        self.lm_head = nn.Linear(8, NUM_CLASSES, bias=bias)
        self.loss = loss

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.lm_head(self.embed(tokens).tanh())
        return logits if self.loss is None else self.loss(logits, tokens)


def tokens() -> Tensor:
    return torch.randint(0, NUM_CLASSES, (2, 6), generator=torch.Generator().manual_seed(0))


def shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = logits[..., :-1, :].contiguous()
    return functional.cross_entropy(shifted.view(-1, shifted.size(-1)), labels[:, 1:].reshape(-1))


def masked_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[labels > 3], labels[labels > 3], reduction="sum")


def smoothed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1)(logits.flatten(0, 1), labels.flatten())


def scaled_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy((2.5 * logits / 3).reshape(-1, NUM_CLASSES), labels.flatten())


def biased_loss(logits: Tensor, labels: Tensor) -> Tensor:
    bias = torch.linspace(-1, 1, NUM_CLASSES, dtype=torch.float64).to(logits.dtype)
    return functional.cross_entropy((logits + bias[None]).view(-1, NUM_CLASSES), labels.flatten())


def softcapped_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy((torch.tanh(logits / 5) * 5).view(-1, NUM_CLASSES), labels.flatten())


def softcapped_twice_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return softcapped_loss(torch.tanh(logits), labels)


def softcapped_biased_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return biased_loss(3 * logits.tanh(), labels)


def transposed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), labels)


def weighted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.ones(NUM_CLASSES, dtype=logits.dtype)
    return functional.cross_entropy(logits.view(-1, NUM_CLASSES), labels.flatten(), weight=weight)


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return shifted_loss(logits, labels) + 0.1 * logits.logsumexp(-1).square().mean()


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    loss = run()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("loss", "is_chunked"),
    [
        (shifted_loss, True),
        (masked_loss, True),
        (smoothed_loss, True),
        (scaled_loss, True),
        (biased_loss, True),
        (z_loss, True),
        (softcapped_loss, True),
        (softcapped_twice_loss, False),
        (softcapped_biased_loss, False),
        (transposed_loss, False),
        (weighted_loss, False),
    ],
)
def test_any_loss_has_the_gradients_of_the_plain_model(
    loss: Callable[[Tensor, Tensor], Tensor], is_chunked: bool, bias: bool
) -> None:
    model = TinyModel(bias=bias, loss=loss).double()
    expected_loss, expected = gradients(model, lambda: model(tokens()))
    with loss_in_chunks(model) as lazy_head:
        found_loss, found = gradients(model, lambda: model(tokens()))
    assert lazy_head.has_chunked is is_chunked
    torch.testing.assert_close(found_loss, expected_loss, rtol=1e-13, atol=0)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-15)
        # Where the logits were read before the loss, everything is as in the plain model.
        assert is_chunked or torch.equal(found[name], gradient)


@pytest.mark.parametrize(
    "read",
    [
        lambda logits: logits + 1,
        lambda logits: (logits + torch.linspace(0, 1, NUM_CLASSES)).exp(),
        lambda logits: logits + torch.linspace(0, 1, 6)[:, None],
        lambda logits: logits[0, 0, 3],
        lambda logits: logits.float().softmax(-1),
        lambda logits: (torch.tanh(logits[:, 1:] / 3) * 3).square(),
        lambda logits: logits.argmax(-1),
        lambda logits: torch.stack([logits, logits]),
        lambda logits: logits[..., 2:5],
        lambda logits: logits[:, -1, :].topk(3).indices,
        lambda logits: logits.view(-1),
        lambda logits: torch.tensor(logits.detach().numpy()),
        lambda logits: torch.tensor(logits.tolist()),
        lambda logits: pickle.loads(pickle.dumps(logits.detach())),
        lambda logits: copy.deepcopy(logits.detach()),
        lambda logits: torch.nn.utils.rnn.pad_sequence([logits[0], logits[1]]),
    ],
)
def test_read_logits_have_the_bits_of_the_plain_model(read: Callable[[Tensor], Tensor]) -> None:
    model = TinyModel(bias=True)
    expected = read(model(tokens()))
    with loss_in_chunks(model):
        logits = model(tokens())
    assert isinstance(logits, LazyLogits)
    assert not logits.was_read
    found = read(logits)
    assert type(found) is Tensor
    assert torch.equal(found, expected)


def test_options_that_the_plain_loss_refuses_are_refused() -> None:
    labels = tokens().flatten()
    model = TinyModel(
        loss=lambda logits, _: functional.cross_entropy(logits.flatten(0, 1), labels, label_smoothing=1.5)
    )
    with pytest.raises(RuntimeError, match="label_smoothing"):
        model(tokens())
    with (
        loss_in_chunks(model),
        pytest.raises(InvalidParameterError, match="label_smoothing must be a number from 0 to 1"),
    ):
        model(tokens())


def test_questions_about_logits_do_not_compute_them() -> None:
    model = TinyModel()
    with loss_in_chunks(model):
        logits = model(tokens())
    assert logits.shape == (2, 6, NUM_CLASSES)
    assert (logits.dtype, logits.device, logits.dim(), logits.requires_grad) == (
        torch.float32,
        torch.device("cpu"),
        3,
        True,
    )
    assert logits.size(-1) == NUM_CLASSES
    assert len(logits) == 2
    assert logits.is_floating_point()
    assert {logits: 1}[logits] == 1
    assert not logits.was_read


def test_logits_read_after_the_loss_are_those_of_the_forward_pass() -> None:
    model = TinyModel()
    expected = model(tokens()).detach()
    with loss_in_chunks(model):
        logits = model(tokens())
        shifted_loss(logits, tokens()).backward()
        with torch.no_grad():
            assert torch.equal(logits.detach(), expected)
    assert "LazyLogits" not in repr(logits)


def test_logits_read_after_the_weight_changed_are_refused() -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with loss_in_chunks(model):
        logits = model(tokens())
        shifted_loss(logits, tokens()).backward()
        optimizer.step()
        with pytest.raises(StaleValueError, match="before the optimizer's step"):
            logits.argmax(-1)


def test_logits_read_outside_of_autocast_have_the_type_of_the_forward_pass() -> None:
    model = TinyModel()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens())
        with loss_in_chunks(model):
            logits = model(tokens())
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits.detach(), expected)


@pytest.mark.parametrize("casts", [False, True])
def test_autocast_and_bfloat16_give_a_loss_of_the_plain_type(casts: bool) -> None:
    model = TinyModel(loss=lambda logits, labels: shifted_loss(logits.float() if casts else logits, labels))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens())
        with loss_in_chunks(model) as lazy_head:
            found = model(tokens())
    assert lazy_head.has_chunked
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)
    model = model.bfloat16()
    with loss_in_chunks(model):
        assert model(tokens()).dtype == (torch.float32 if casts else torch.bfloat16)


class _ReadInForward(torch.autograd.Function):
    """A fused loss as other libraries have them: it gets the logits without torch's overrides noticing."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return 2 * logits * gradient


def test_custom_functions_get_the_logits_and_pass_gradients_on() -> None:
    model = TinyModel(bias=True, loss=lambda logits, labels: _ReadInForward.apply(logits))
    expected_loss, expected = gradients(model, lambda: model(tokens()))
    with loss_in_chunks(model):
        loss, found = gradients(model, lambda: model(tokens()))
    assert torch.equal(loss, expected_loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_logits_are_plain_without_gradients_and_when_the_block_has_ended() -> None:
    model = TinyModel()
    state = list(model.state_dict())
    with loss_in_chunks(model):
        assert list(model.state_dict()) == state
        with torch.no_grad():
            assert type(model(tokens())) is Tensor
    assert "forward" not in vars(model.lm_head)
    assert type(model(tokens())) is Tensor


def test_a_copied_model_has_plain_logits() -> None:
    model = TinyModel()
    with loss_in_chunks(model):
        twin = copy.deepcopy(model)
    assert type(twin(tokens())) is Tensor


class Adapted(nn.Linear):
    """A projection with an adapter beside it, as LoRA's are."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: delattr(model, "lm_head"), "has no module named lm_head"),
        (lambda model: setattr(model, "lm_head", Adapted(8, NUM_CLASSES)), r"lm_head \(Adapted\)"),
        (lambda model: nn.utils.parametrizations.weight_norm(model.lm_head), "ParametrizedLinear"),
        (lambda model: setattr(model, "draft", nn.ModuleDict({"lm_head": nn.Linear(8, 3)})), "draft.lm_head"),
    ],
)
def test_models_without_one_plain_head_are_refused(change: Callable[[nn.Module], None], message: str) -> None:
    model = TinyModel()
    change(model)
    with pytest.raises(InvalidParameterError, match=message):
        head_of(model)
