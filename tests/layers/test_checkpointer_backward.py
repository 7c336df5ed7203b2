"""The backward sweep: the gradient bit for bit, the fewest forward calls, and never more slots than allowed."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import CheckpointMissingError, InvalidParameterError
from memfit.layers.checkpointing.checkpointer import ActivationCheckpointer, CheckpointConfig
from memfit.layers.checkpointing.revolve import advances, forward_calls

Array = np.ndarray[Any, Any]


class Chain:
    """tanh(W_l x + b_l), its vector-Jacobian product, and a record of the calls made and the slots in use."""

    def __init__(self, width: int = 3) -> None:
        self.width = width
        self.forward_layers: list[int] = []
        self.reversed_layers: list[int] = []
        self.most_slots = 0
        self.hooked_modules: ActivationCheckpointer | None = None

    def weight(self, layer: int) -> Array:
        return np.random.default_rng(layer).normal(size=(self.width, self.width)) / np.sqrt(self.width)

    def forward(self, activation: Array, layer: int) -> Array:
        self.forward_layers.append(layer)
        self._saved_tensor_hooks()
        return np.tanh(self.weight(layer) @ activation + 0.01 * layer)

    def vjp(self, activation: Array, layer: int, gradient: Array) -> Array:
        self.reversed_layers.append(layer)
        self._saved_tensor_hooks()
        output = np.tanh(self.weight(layer) @ activation + 0.01 * layer)
        return self.weight(layer).T @ (gradient * (1 - output**2))

    def _saved_tensor_hooks(self) -> None:
        if self.hooked_modules is not None:
            self.most_slots = max(self.most_slots, self.hooked_modules.num_checkpoints)


def plain_gradient(input: Array, layers: list[int], grad_output: Array) -> Array:
    """The gradient with every activation held, by the same two functions."""
    chain = Chain(len(input))
    activations = [input]
    for layer in layers:
        activations.append(chain.forward(activations[-1], layer))
    gradient = grad_output
    for layer, activation in zip(reversed(layers), reversed(activations[:-1]), strict=True):
        gradient = chain.vjp(activation, layer, gradient)
    return gradient


def swept(config: CheckpointConfig, layers: list[int]) -> tuple[Array, Chain, ActivationCheckpointer]:
    checkpointer = ActivationCheckpointer(config)
    chain = Chain()
    chain.hooked_modules = checkpointer
    checkpointer.checkpointed_forward(np.array([0.3, -1.0, 2.0]), layers, chain.forward)
    gradient = checkpointer.backward(np.array([1.0, 0.5, -0.25]), layers, chain.forward, chain.vjp)
    return gradient, chain, checkpointer


@given(
    st.lists(st.integers(0, 99), unique=True, max_size=30),
    st.integers(0, 6),
    st.integers(0, 8),
    st.sampled_from(["binomial", "even"]),
)
def test_the_gradient_equals_the_plain_one_bit_for_bit(
    layers: list[int], interval: int, num_slots: int, spread: Any
) -> None:
    gradient, chain, checkpointer = swept(CheckpointConfig(interval, num_slots, spread=spread), layers)
    expected = plain_gradient(np.array([0.3, -1.0, 2.0]), layers, np.array([1.0, 0.5, -0.25]))
    np.testing.assert_array_equal(gradient, expected)
    assert chain.reversed_layers == layers[::-1]
    assert chain.most_slots <= num_slots
    assert checkpointer.num_checkpoints == checkpointer.memory_stored_bytes == 0
    assert checkpointer.memory_input_bytes == 24


def test_the_gradient_agrees_with_finite_differences() -> None:
    layers = list(range(12))
    input, grad_output = np.array([0.3, -1.0, 2.0]), np.array([1.0, 0.5, -0.25])
    checkpointer = ActivationCheckpointer(CheckpointConfig(1, 3))
    chain = Chain()

    def loss(at: Array) -> float:
        return float(grad_output @ checkpointer.checkpointed_forward(at, layers, chain.forward))

    # Central differences: the error is h^2 times a third derivative of order 1, and 1e-16 / h from rounding.
    h = 1e-5
    differences = [(loss(input + h * unit) - loss(input - h * unit)) / (2 * h) for unit in np.eye(3)]
    loss(input)
    gradient = checkpointer.backward(grad_output, layers, chain.forward, chain.vjp)
    np.testing.assert_allclose(gradient, differences, rtol=0, atol=1e-9)


@given(st.integers(1, 60), st.data())
def test_forward_and_backward_make_the_binomial_optimum_of_calls_and_fill_the_slots(
    num_layers: int, data: st.DataObject
) -> None:
    num_slots = data.draw(st.integers(0, num_layers - 1))
    _, chain, _ = swept(CheckpointConfig(1, num_slots), list(range(num_layers)))
    assert len(chain.forward_layers) == forward_calls(num_layers, num_slots)
    assert chain.most_slots == num_slots


@pytest.mark.parametrize(
    ("num_layers", "num_slots", "calls"),
    [(23, 4, 44), (24, 5, 42), (13, 2, 27), (9, 2, 15), (99, 9, 222), (24, 0, 300), (24, 24, 24)],
)
def test_forward_calls_of_a_whole_sweep_by_the_published_formula(num_layers: int, num_slots: int, calls: int) -> None:
    _, chain, _ = swept(CheckpointConfig(1, num_slots), list(range(num_layers)))
    assert len(chain.forward_layers) == calls == advances(num_layers + 1, num_slots + 1)


def test_with_free_slots_each_dropped_activation_is_recomputed_once() -> None:
    _, chain, _ = swept(CheckpointConfig(4, 64), list(range(24)))
    boundaries = set(range(0, 24, 4))
    # The last layer's output is no layer's input, so it is not needed again.
    assert sorted(chain.forward_layers[24:]) == [layer for layer in range(23) if layer not in boundaries]


def test_without_boundaries_the_slots_still_serve_the_sweep() -> None:
    _, chain, _ = swept(CheckpointConfig(0, 5), list(range(24)))
    assert len(chain.forward_layers) == 24 + advances(24, 6) == 64
    assert chain.most_slots == 5


def test_a_second_sweep_starts_from_the_input_and_gives_the_same_gradient() -> None:
    layers = list(range(10))
    gradient, chain, checkpointer = swept(CheckpointConfig(3, 4), layers)
    again = checkpointer.backward(np.array([1.0, 0.5, -0.25]), layers, chain.forward, chain.vjp)
    np.testing.assert_array_equal(again, gradient)


def test_a_layer_saved_by_hand_keeps_its_slot_through_the_sweep() -> None:
    layers = list(range(10))
    checkpointer = ActivationCheckpointer(CheckpointConfig(5, 3))
    chain = Chain()
    chain.hooked_modules = checkpointer
    checkpointer.checkpointed_forward(np.ones(3), layers, chain.forward)
    checkpointer.save(77, np.zeros(2))
    gradient = checkpointer.backward(np.ones(3), layers, chain.forward, chain.vjp)
    np.testing.assert_array_equal(gradient, plain_gradient(np.ones(3), layers, np.ones(3)))
    assert checkpointer.get(77).tolist() == [0.0, 0.0]
    assert chain.most_slots == 3


@given(st.integers(1, 25), st.integers(0, 5), st.integers(0, 5), st.data())
def test_a_function_that_raises_in_the_sweep_leaves_right_checkpoints_and_the_sweep_can_be_repeated(
    num_layers: int, interval: int, num_slots: int, data: st.DataObject
) -> None:
    layers = list(range(num_layers))
    checkpointer = ActivationCheckpointer(CheckpointConfig(interval, num_slots))
    chain = Chain()
    checkpointer.checkpointed_forward(np.ones(3), layers, chain.forward)
    calls_left = data.draw(st.integers(0, 2 * num_layers))

    def may_raise() -> None:
        nonlocal calls_left
        calls_left -= 1
        if calls_left < 0:
            raise OSError("no more")

    def forward(activation: Array, layer: int) -> Array:
        may_raise()
        return chain.forward(activation, layer)

    def vjp(activation: Array, layer: int, gradient: Array) -> Array:
        may_raise()
        return chain.vjp(activation, layer, gradient)

    expected = plain_gradient(np.ones(3), layers, np.ones(3))
    try:
        np.testing.assert_array_equal(checkpointer.backward(np.ones(3), layers, forward, vjp), expected)
    except OSError:
        output = np.ones(3)
        for layer in layers:
            output = chain.forward(output, layer)
            np.testing.assert_array_equal(checkpointer.recompute_from_checkpoint(layer, layers, chain.forward), output)
    assert checkpointer.num_checkpoints <= num_slots
    again = checkpointer.backward(np.ones(3), layers, chain.forward, chain.vjp)
    np.testing.assert_array_equal(again, expected)


def test_functions_may_work_in_place() -> None:
    def forward(activation: Array, layer: int) -> Array:
        np.multiply(activation, activation, out=activation)
        activation += 0.1 * layer
        return activation

    def vjp(activation: Array, layer: int, gradient: Array) -> Array:
        activation *= 2
        activation *= gradient
        return activation

    layers = list(range(11))
    expected_activations = [np.array([0.5, 0.25])]
    for layer in layers:
        expected_activations.append(forward(expected_activations[-1].copy(), layer))
    expected = np.ones(2)
    for layer in reversed(layers):
        expected = vjp(expected_activations[layer].copy(), layer, expected)
    for config in CheckpointConfig(3, 8), CheckpointConfig(1, 3), CheckpointConfig(0, 0):
        checkpointer = ActivationCheckpointer(config)
        checkpointer.checkpointed_forward(np.array([0.5, 0.25]), layers, forward)
        np.testing.assert_array_equal(checkpointer.backward(np.ones(2), layers, forward, vjp), expected)


@pytest.mark.parametrize("config", [CheckpointConfig(), CheckpointConfig(1, 2), CheckpointConfig(0, 0)])
def test_torch_gradients_equal_autograds_bit_for_bit(config: CheckpointConfig) -> None:
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(9)]
    input, grad_output = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    (expected,) = torch.autograd.grad(torch.nn.Sequential(*blocks)(input), input, grad_output)

    def forward(activation: torch.Tensor, layer: int) -> torch.Tensor:
        with torch.no_grad():
            return blocks[layer](activation)

    def vjp(activation: torch.Tensor, layer: int, gradient: torch.Tensor) -> torch.Tensor:
        activation.requires_grad_()
        return torch.autograd.grad(blocks[layer](activation), activation, gradient)[0]

    checkpointer = ActivationCheckpointer(config)
    checkpointer.checkpointed_forward(input, range(9), forward)
    assert torch.equal(checkpointer.backward(grad_output, range(9), forward, vjp), expected)


def test_in_mixed_precision_the_gradient_is_near_the_plain_one() -> None:
    layers = list(range(10))
    plain, _, _ = swept(CheckpointConfig(2, 64), layers)
    mixed, _, _ = swept(CheckpointConfig(2, 64, use_mixed_precision=True), layers)
    # Activations are off by 2^-8 at most; ten layers of contractions do not raise that to a tenth.
    np.testing.assert_allclose(mixed, plain, rtol=0.1)
    assert not np.array_equal(mixed, plain)


def test_an_empty_chain_hands_the_gradient_through() -> None:
    checkpointer = ActivationCheckpointer()
    checkpointer.checkpointed_forward(np.ones(1), [], Chain().forward)
    assert checkpointer.backward(np.array([3.0]), [], Chain().forward, Chain().vjp).tolist() == [3.0]


def test_backward_needs_a_forward_over_the_same_layers() -> None:
    checkpointer = ActivationCheckpointer()
    chain = Chain()
    with pytest.raises(CheckpointMissingError, match=r"layers \[0, 1\] cannot be replayed: no input is kept"):
        checkpointer.backward(np.ones(3), [0, 1], chain.forward, chain.vjp)
    checkpointer.checkpointed_forward(np.ones(3), [0, 1, 2], chain.forward)
    for other in [0, 1], [0, 2, 1], [0, 1, 2, 3]:
        with pytest.raises(InvalidParameterError, match=r"what the last forward pass ran, \[0, 1, 2\]"):
            checkpointer.backward(np.ones(3), other, chain.forward, chain.vjp)
    assert chain.reversed_layers == []
    assert checkpointer.num_checkpoints == 1


@pytest.mark.parametrize(("use_mixed_precision", "bytes_a_slot"), [(False, 8 << 15), (True, 2 << 15)])
@pytest.mark.parametrize("num_slots", [0, 5, 10])
def test_the_memory_in_use_is_the_slots_the_input_and_a_few_working_arrays(
    num_slots: int, use_mixed_precision: bool, bytes_a_slot: int
) -> None:
    input, grad_output = np.ones(1 << 15), np.ones(1 << 15)
    layers = range(50)
    checkpointer = ActivationCheckpointer(CheckpointConfig(1, num_slots, use_mixed_precision))
    tracemalloc.start()
    try:
        checkpointer.checkpointed_forward(input, layers, lambda x, layer: np.sin(x))
        between = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        checkpointer.backward(grad_output, layers, lambda x, layer: np.sin(x), lambda x, layer, g: g * np.cos(x))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Python's own objects take a few KiB.
    kept = num_slots * bytes_a_slot + input.nbytes
    assert kept == pytest.approx(between, abs=32 << 10)
    # The activation, the next one or its cosine, two gradients; in 16 bits, also the numbers on their way in and out.
    assert peak <= kept + (6 if use_mixed_precision else 4) * input.nbytes + (32 << 10)
