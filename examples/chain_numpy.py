"""Reverse a chain of NumPy layers with few activations in memory: what each number of slots costs in calls.

Run it with ``python examples/chain_numpy.py``. The chain is 24 layers of tanh(x @ weight). A gradient printed as
equal is equal, bit for bit, to the one computed with all activations held.
"""

from __future__ import annotations

import numpy as np

from memfit import ActivationCheckpointer, CheckpointConfig

NUM_LAYERS, BATCH, WIDTH = 24, 64, 64
LAYERS = range(NUM_LAYERS)


class TanhChain:
    """The two functions a sweep needs, a count of the forward calls, and the most bytes held at any time."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.weights = [random.normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH) for _ in LAYERS]
        self.num_forward_calls = 0
        self.most_bytes_held = 0
        self.hooked_modules: ActivationCheckpointer | None = None

    def forward(self, activation: np.ndarray, layer: int) -> np.ndarray:
        self.num_forward_calls += 1
        self.watch()
        return np.tanh(activation @ self.weights[layer])

    def vjp(self, activation: np.ndarray, layer: int, grad_out: np.ndarray) -> np.ndarray:
        self.watch()
        output = np.tanh(activation @ self.weights[layer])
        return (grad_out * (1 - output**2)) @ self.weights[layer].T

    def watch(self) -> None:
        if self.hooked_modules is not None:
            held = self.hooked_modules.memory_stored_bytes + self.hooked_modules.memory_input_bytes
            self.most_bytes_held = max(self.most_bytes_held, held)


def gradient_with_everything_held(x: np.ndarray, grad_output: np.ndarray) -> np.ndarray:
    chain = TanhChain()
    activations = [x]
    for layer in LAYERS:
        activations.append(chain.forward(activations[-1], layer))
    gradient = grad_output
    for layer in reversed(LAYERS):
        gradient = chain.vjp(activations[layer], layer, gradient)
    return gradient


def main() -> None:
    x = np.random.default_rng(1).normal(size=(BATCH, WIDTH))
    grad_output = np.ones((BATCH, WIDTH))
    expected = gradient_with_everything_held(x, grad_output)
    print("| slots | held, KiB | forward calls | gradient |")
    print("|---|---|---|---|")
    for num_slots in (0, 1, 2, 3, 5, 8, 12, 24):
        chain = TanhChain()
        checkpointer = ActivationCheckpointer(CheckpointConfig(checkpoint_every_n_layers=1, max_checkpoints=num_slots))
        chain.hooked_modules = checkpointer
        checkpointer.checkpointed_forward(x, LAYERS, chain.forward)
        chain.watch()
        gradient = checkpointer.backward(grad_output, LAYERS, chain.forward, chain.vjp)
        verdict = "equal" if np.array_equal(gradient, expected) else "DIFFERENT"
        print(f"| {num_slots} | {chain.most_bytes_held // 1024} | {chain.num_forward_calls} | {verdict} |")


if __name__ == "__main__":
    main()
