"""`linear_cross_entropy` against torch's own loss in float64, and what it holds in memory."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

import memfit
from memfit.runtime.chunked_loss.linear_cross_entropy import (
    LossOptions,
    Softcap,
    _eager_loss_and_gradient,
    _fusible_loss_and_gradient,
    default_chunk_tokens,
)

Gradients = list[Tensor | None]


def inputs(
    num_tokens: int, width: int, num_classes: int, dtype: torch.dtype, *, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(num_classes, width, generator=generator, dtype=torch.float64) / width**0.5
    bias = torch.randn(num_classes, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, num_classes, (num_tokens,), generator=generator)
    targets[::5] = -100
    hidden, weight, bias = (tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias))
    return hidden, weight, bias, targets


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, softcap: float | None = None, **options
) -> tuple[Tensor, Gradients]:
    """Return torch's loss and gradients in float64."""
    wide = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    assert wide[0] is not None
    assert wide[1] is not None
    logits = functional.linear(wide[0], wide[1], wide[2])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), **options)
    loss.backward()
    return loss.detach(), [None if tensor is None else tensor.grad for tensor in wide]


def assert_within(found: Tensor, expected: Tensor, bound: float) -> None:
    distance = (found.double() - expected).norm() / expected.norm().clamp_min(1e-300)
    assert distance <= bound, float(distance)


BOUNDS = {
    torch.float64: 64 * torch.finfo(torch.float64).eps,
    torch.float32: 64 * torch.finfo(torch.float32).eps,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
}


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize(
    ("reduction", "smoothing", "has_bias", "softcap"),
    list(product(("mean", "sum"), (0.0, 0.1), (False, True), (None, 2.0))),
)
def test_loss_and_gradients_are_within_the_stated_bound(
    dtype: torch.dtype, reduction: str, smoothing: float, has_bias: bool, softcap: float | None
) -> None:
    hidden, weight, bias, targets = inputs(83, 32, 101, dtype)
    given_bias = bias if has_bias else None
    options = {"reduction": reduction, "label_smoothing": smoothing, "softcap": softcap}
    loss = memfit.linear_cross_entropy(hidden, weight, targets, bias=given_bias, chunk_tokens=16, **options)
    loss.backward()
    expected, gradients = reference(hidden, weight, targets, given_bias, **options)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_within(loss.detach(), expected, BOUNDS[dtype])
    for tensor, gradient in zip((hidden, weight, given_bias), gradients, strict=True):
        if tensor is not None:
            assert gradient is not None
            assert tensor.grad is not None
            assert tensor.grad.dtype == dtype
            assert_within(tensor.grad, gradient, BOUNDS[dtype])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(1, 50),
    st.sampled_from((0.0, 0.3, 1.0)),
    st.integers(0, 99),
)
def test_any_shape_and_any_chunk_give_the_same_loss(
    num_tokens: int, width: int, num_classes: int, chunk_tokens: int, smoothing: float, seed: int
) -> None:
    hidden, weight, bias, targets = inputs(num_tokens + 1, width, num_classes, torch.float64, seed=seed)
    loss = memfit.linear_cross_entropy(
        hidden, weight, targets, bias=bias, label_smoothing=smoothing, chunk_tokens=chunk_tokens
    )
    loss.backward()
    expected, gradients = reference(hidden, weight, targets, bias, label_smoothing=smoothing)
    # Gradients may cancel to nothing, so that a bound relative to them would be too strict.
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=1e-12)
    for tensor, gradient in zip((hidden, weight, bias), gradients, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-11, atol=1e-12)


def test_gradcheck_passes() -> None:
    hidden, weight, bias, targets = inputs(7, 4, 5, torch.float64)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return memfit.linear_cross_entropy(
            hidden, weight, targets, bias=bias, label_smoothing=0.2, softcap=1.5, chunk_tokens=3
        )

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


@pytest.mark.parametrize("follows", [lambda gradient: gradient.sum(), lambda gradient: (gradient * gradient).sum()])
def test_differentiating_twice_is_refused(follows) -> None:
    hidden, weight, _, targets = inputs(7, 4, 5, torch.float64)
    loss = memfit.linear_cross_entropy(hidden, weight, targets)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(memfit.MemfitError, match="cannot be differentiated twice"):
        follows(gradient).backward()


def test_transforms_of_torch_func_are_refused() -> None:
    hidden, weight, _, targets = inputs(7, 4, 5, torch.float64)
    with pytest.raises(memfit.MemfitError, match=r"cannot be transformed by torch.func .* use torch.nn.functional"):
        torch.func.grad(lambda weight: memfit.linear_cross_entropy(hidden, weight, targets))(weight.detach())


def test_gradients_in_float16_do_not_underflow_when_the_mean_is_over_many_tokens() -> None:
    """A gradient that is divided by the number of tokens before it is multiplied by the loss scale would be 0."""
    hidden, weight, _, targets = inputs(1024, 16, 1000, torch.float16)
    scale = 2.0**14
    loss = memfit.linear_cross_entropy(hidden, weight, targets, chunk_tokens=512)
    (loss * scale).backward()
    _, gradients = reference(hidden, weight, targets, None)
    assert hidden.grad is not None
    assert gradients[0] is not None
    assert_within(hidden.grad / scale, gradients[0], 4 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("size", [60.0, 20_000.0])
def test_sums_over_tokens_may_pass_the_largest_float16(size: float) -> None:
    hidden = torch.full((2048, 2), size, dtype=torch.float16)
    weight = torch.zeros(2, 2, dtype=torch.float16, requires_grad=True)
    targets = torch.zeros(2048, dtype=torch.int64)
    memfit.linear_cross_entropy(hidden, weight, targets, chunk_tokens=2048).backward()
    assert weight.grad is not None
    assert weight.grad[1].tolist() == [size / 2, size / 2]


def test_gradients_in_bfloat16_are_scaled_by_the_factor_itself() -> None:
    """A third rounded to bfloat16 is off by 0.2 %, and so would be the length of every gradient."""
    factor = 1 / 3
    hidden, weight, _, targets = inputs(64, 32, 50, torch.bfloat16)
    loss = memfit.linear_cross_entropy(hidden, weight, targets)
    whole = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    scaled = torch.autograd.grad(loss * factor, (hidden, weight))
    for one, part in zip(whole, scaled, strict=True):
        along = (part.double() * one.double()).sum() / one.double().square().sum()
        assert abs(along / factor - 1) < 5e-4


def test_no_tokens_at_all_are_nan_in_the_mean_as_in_torch() -> None:
    hidden, weight, _, targets = (tensor[:0] for tensor in inputs(6, 4, 5, torch.float32))
    _, weight, _, _ = inputs(6, 4, 5, torch.float32)
    loss = memfit.linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss.isnan()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_batches_of_sequences_have_gradients_of_their_own_shape() -> None:
    hidden, weight, _, targets = inputs(24, 8, 11, torch.float32)
    batch = hidden.detach().reshape(4, 6, 8).requires_grad_()
    memfit.linear_cross_entropy(batch, weight, targets.reshape(4, 6), chunk_tokens=5).backward()
    memfit.linear_cross_entropy(hidden, weight.detach(), targets, chunk_tokens=5).backward()
    assert batch.grad is not None
    assert torch.equal(batch.grad.reshape(24, 8), hidden.grad)


def test_only_required_gradients_are_computed() -> None:
    hidden, weight, bias, targets = inputs(20, 8, 11, torch.float32)
    loss = memfit.linear_cross_entropy(hidden, weight.detach(), targets, bias=bias.detach(), chunk_tokens=8)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        plain = memfit.linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_tokens=8)
        capped = memfit.linear_cross_entropy(hidden, weight, targets, bias=bias, softcap=1.5, chunk_tokens=8)
    assert not plain.requires_grad
    assert torch.equal(plain, loss.detach())
    assert_within(capped, reference(hidden, weight, targets, bias, 1.5)[0], BOUNDS[torch.float32])


def test_a_weight_that_is_tied_to_the_embedding_gets_both_gradients() -> None:
    _, weight, _, targets = inputs(20, 8, 11, torch.float64)
    tokens = torch.arange(20) % 11

    def gradient(loss_of) -> Tensor:
        weight.grad = None
        loss_of(functional.embedding(tokens, weight)).backward()
        assert weight.grad is not None
        return weight.grad

    chunked = gradient(lambda hidden: memfit.linear_cross_entropy(hidden, weight, targets, chunk_tokens=8))
    whole = gradient(lambda hidden: functional.cross_entropy(functional.linear(hidden, weight), targets))
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-14)


def test_gradients_are_scaled_by_what_follows_the_loss() -> None:
    hidden, weight, _, targets = inputs(20, 8, 11, torch.float64)
    loss = memfit.linear_cross_entropy(hidden, weight, targets, chunk_tokens=8)
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    thrice = torch.autograd.grad(3 * loss, (hidden, weight))
    for one, three in zip(once, thrice, strict=True):
        assert torch.equal(3 * one, three)


def test_nothing_to_count_is_nan_in_the_mean_with_gradients_of_zero_as_in_torch() -> None:
    hidden, weight, _, targets = inputs(6, 4, 5, torch.float32)
    targets.fill_(-100)
    loss = memfit.linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    expected, gradients = reference(hidden, weight, targets, None)
    assert loss.isnan()
    assert expected.isnan()
    assert gradients[0] is not None
    assert torch.equal(hidden.grad, gradients[0].float())
    assert memfit.linear_cross_entropy(hidden, weight, targets, reduction="sum") == 0


def test_autocast_computes_products_in_its_type_and_gradients_in_the_inputs_type() -> None:
    hidden, weight, _, targets = inputs(40, 16, 23, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = memfit.linear_cross_entropy(hidden, weight, targets, chunk_tokens=16)
        logits = functional.linear(hidden, weight)
    loss.backward()
    assert logits.dtype == torch.bfloat16
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    expected, gradients = reference(hidden, weight, targets, None)
    assert_within(loss.detach(), expected, BOUNDS[torch.bfloat16])
    assert gradients[1] is not None
    assert_within(weight.grad, gradients[1], BOUNDS[torch.bfloat16])


def test_weight_gradients_are_summed_in_float32() -> None:
    """A thousand chunks of one token: a sum in bfloat16 would stop growing after a few hundred."""
    hidden = torch.ones(1024, 2, dtype=torch.bfloat16)
    weight = torch.zeros(2, 2, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(1024, dtype=torch.int64)
    memfit.linear_cross_entropy(hidden, weight, targets, reduction="sum", chunk_tokens=1).backward()
    assert weight.grad is not None
    assert weight.grad[1].tolist() == [512.0, 512.0]


def peak_bytes(run) -> int:
    """Return the peak of the CPU allocator's own events above where it started."""
    with torch_profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    current = peak = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return peak


def test_peak_holds_one_chunk_of_logits_and_the_gradients() -> None:
    num_tokens, width, num_classes, chunk = 1024, 64, 4096, 64
    hidden, weight, _, targets = inputs(num_tokens, width, num_classes, torch.float32)
    peak = peak_bytes(lambda: memfit.linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk).backward())
    logits_of_chunk, gradients = 4 * chunk * num_classes, 4 * (num_tokens + num_classes) * width
    # The logits, what logsumexp makes of them, and the gradients before and after they are scaled.
    assert peak <= 3 * logits_of_chunk + 2 * gradients
    plain = peak_bytes(lambda: functional.cross_entropy(functional.linear(hidden, weight), targets).backward())
    assert plain >= 2 * 4 * num_tokens * num_classes


@pytest.mark.parametrize("softcap", [None, Softcap(3.0, 2.0)])
def test_what_is_compiled_on_gpus_computes_the_same(softcap: Softcap | None) -> None:
    options = LossOptions(-100, True, 0.1, softcap)
    logits = torch.randn(20, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(20) % 11
    targets[::5] = -100
    loss, gradient = _fusible_loss_and_gradient(logits, targets, options, torch.float64)
    expected_loss, expected = _eager_loss_and_gradient(logits.clone(), targets, options, torch.float64)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


def test_chunks_are_chosen_by_memory() -> None:
    assert default_chunk_tokens(32_000, 2048) == 2048
    assert default_chunk_tokens(128_256, 4096) == 4096
    assert default_chunk_tokens(50_257, 100) == 256
    assert default_chunk_tokens(10, 100) >= 2**19


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reduction": "none"}, 'reduction must be "mean" or "sum"'),
        ({"label_smoothing": 1.5}, "label_smoothing must be a number from 0 to 1"),
        ({"label_smoothing": "much"}, "label_smoothing must be a number from 0 to 1"),
        ({"ignore_index": 1.0}, "ignore_index must be a whole number"),
        ({"softcap": 0}, "softcap must be a positive number"),
        ({"softcap": "much"}, "softcap must be a positive number"),
        ({"chunk_tokens": 0}, "chunk_tokens must be a whole number, at least 1"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, "targets must have the shape of hidden"),
        ({"targets": torch.zeros(6)}, "targets must be class indices"),
        ({"targets": torch.zeros(6, 5)}, "got class probabilities"),
        ({"targets": torch.full((6,), 9)}, "targets must be from 0 to 4, or ignore_index=-100; got 9"),
        ({"targets": torch.full((6,), -1)}, "got -1"),
        ({"weight": torch.zeros(5, 3)}, "hidden must have the shape"),
        ({"weight": torch.zeros(5, 4, dtype=torch.float64)}, "one floating type"),
        ({"bias": torch.zeros(4)}, "bias must have the shape"),
        ({"hidden": [1.0]}, "hidden must be a tensor"),
    ],
)
def test_wrong_arguments_are_named(changed: dict[str, object], message: str) -> None:
    hidden, weight, _, targets = inputs(6, 4, 5, torch.float32)
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, **changed}
    with pytest.raises(memfit.InvalidParameterError, match=message.replace("(", r"\(")):
        memfit.linear_cross_entropy(**arguments)


# dynamo itself instantiates the function, which torch deprecates, and on torch 2.11 reads gradients of other tensors.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_works_inside_a_compiled_model() -> None:
    hidden, weight, _, targets = inputs(20, 8, 11, torch.float32)

    @torch.compile(backend="aot_eager")
    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        return memfit.linear_cross_entropy(hidden * 1, weight, targets, chunk_tokens=8)

    loss_of(hidden, weight).backward()
    compiled = hidden.grad
    hidden.grad = None
    memfit.linear_cross_entropy(hidden, weight, targets, chunk_tokens=8).backward()
    torch.testing.assert_close(compiled, hidden.grad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_chunks_are_within_the_bound_on_a_gpu(dtype: torch.dtype) -> None:
    hidden, weight, bias, targets = (tensor.detach().cuda() for tensor in inputs(530, 64, 1001, dtype))
    hidden, weight, bias = (tensor.requires_grad_() for tensor in (hidden, weight, bias))
    loss = memfit.linear_cross_entropy(hidden, weight, targets, bias=bias, label_smoothing=0.1, chunk_tokens=256)
    loss.backward()
    expected, gradients = reference(hidden, weight, targets, bias, label_smoothing=0.1)
    assert_within(loss.detach(), expected, BOUNDS[dtype])
    for tensor, gradient in zip((hidden, weight, bias), gradients, strict=True):
        assert tensor.grad is not None
        assert gradient is not None
        assert_within(tensor.grad, gradient, BOUNDS[dtype])
