"""The checkpointer's store, forward pass and recomputation: what is held where, and what a mistake leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import (
    CheckpointCapacityError,
    CheckpointMissingError,
    InvalidParameterError,
    LayerIndexError,
    MemfitError,
)
from memfit.layers.checkpointing.checkpointer import ActivationCheckpointer, CheckpointConfig
from memfit.layers.checkpointing.revolve import binomial_states

Array = np.ndarray[Any, Any]


class Counted:
    """A forward function that remembers which layers it ran."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, activation: Array, layer: int) -> Array:
        self.calls.append(layer)
        return np.tanh(activation * 1.1 + 0.01 * layer)


def outputs_of(input: Array, layers: list[int]) -> dict[int, Array]:
    """Every layer's output, computed without a checkpointer."""
    forward = Counted()
    return {layer: (input := forward(input, layer)) for layer in layers}


def stored_layers(checkpointer: ActivationCheckpointer, layers: list[int]) -> list[int]:
    def is_stored(layer: int) -> bool:
        try:
            checkpointer.get(layer)
        except LookupError:
            return False
        return True

    return [layer for layer in layers if is_stored(layer)]


def state_of(checkpointer: ActivationCheckpointer) -> tuple[int, int, int, int]:
    return (
        checkpointer.num_checkpoints,
        checkpointer.memory_stored_bytes,
        checkpointer.memory_saved_bytes,
        checkpointer.memory_input_bytes,
    )


chains = st.lists(st.integers(0, 200), unique=True, max_size=40)
configs = st.builds(
    CheckpointConfig,
    checkpoint_every_n_layers=st.integers(0, 8),
    max_checkpoints=st.integers(0, 12),
    spread=st.sampled_from(["binomial", "even"]),
)


def test_defaults() -> None:
    assert CheckpointConfig() == CheckpointConfig(4, 64, False)
    assert ActivationCheckpointer().config == CheckpointConfig()


@pytest.mark.parametrize("name", ["checkpoint_every_n_layers", "max_checkpoints"])
@pytest.mark.parametrize("wrong", [-1, 2.0, True, None, "3", float("nan")])
def test_config_takes_whole_numbers_only(name: str, wrong: object) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name} must be a whole number, at least 0"):
        CheckpointConfig(**{name: wrong})


def test_config_takes_numpys_whole_numbers_and_makes_them_ints() -> None:
    config = CheckpointConfig(np.int64(3), np.uint8(7))
    assert type(config.checkpoint_every_n_layers) is int
    assert config == CheckpointConfig(3, 7)


def test_config_refuses_what_is_neither_true_nor_false_and_an_unknown_spread() -> None:
    with pytest.raises(InvalidParameterError, match=r"use_mixed_precision must be True or False; got 1 \(int\)"):
        CheckpointConfig(use_mixed_precision=1)
    with pytest.raises(InvalidParameterError, match="spread must be 'binomial' or 'even'; got 'odd'"):
        CheckpointConfig(spread="odd")
    with pytest.raises(InvalidParameterError, match="config must be a CheckpointConfig; got 4"):
        ActivationCheckpointer(4)


@given(st.integers(0, 50), st.integers(0, 1000))
def test_a_boundary_is_told_by_the_layers_number(interval: int, layer: int) -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(interval))
    assert checkpointer.is_checkpoint_layer(layer) is (interval != 0 and layer % interval == 0)


@pytest.mark.parametrize("wrong", [-1, 1.0, True, None, "1"])
def test_a_layer_is_a_whole_number_everywhere(wrong: Any) -> None:
    checkpointer = ActivationCheckpointer()
    checkpointer.checkpointed_forward(np.ones(1), [0, 1], Counted())
    before = state_of(checkpointer)
    attempts: list[Callable[[], object]] = [
        lambda: checkpointer.is_checkpoint_layer(wrong),
        lambda: checkpointer.save(wrong, np.ones(1)),
        lambda: checkpointer.get(wrong),
        lambda: checkpointer.recompute_from_checkpoint(wrong, [0, 1], Counted()),
        lambda: checkpointer.checkpointed_forward(np.ones(1), [0, wrong], Counted()),
        lambda: checkpointer.checkpointed_forward(np.ones(1), wrong, Counted()),
    ]
    for attempt in attempts:
        with pytest.raises(InvalidParameterError):
            attempt()
    assert state_of(checkpointer) == before


def test_saving_over_a_layer_counts_what_is_held() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(4, 1))
    checkpointer.save(7, np.ones(10))
    checkpointer.save(7, np.zeros(3))
    assert checkpointer.num_checkpoints == 1
    assert checkpointer.memory_stored_bytes == 24
    assert checkpointer.get(7).tolist() == [0, 0, 0]


def test_saving_a_new_layer_into_a_full_store_is_refused_and_changes_nothing() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(4, 1))
    checkpointer.save(7, np.ones(2))
    with pytest.raises(CheckpointCapacityError, match=r"no slot for layer 9: max_checkpoints is 1.*layers \[7\]"):
        checkpointer.save(9, np.ones(2))
    assert state_of(checkpointer) == (1, 16, 0, 0)
    with pytest.raises(LayerIndexError, match=r"layer 9 is beyond the layers saved so far \(up to 7\)"):
        checkpointer.get(9)


def test_get_tells_a_layer_never_reached_from_one_not_stored() -> None:
    checkpointer = ActivationCheckpointer()
    with pytest.raises(LayerIndexError, match=r"layer 0 is beyond the layers saved so far \(none\)"):
        checkpointer.get(0)
    checkpointer.save(5, np.ones(1))
    with pytest.raises(CheckpointMissingError, match=r"nothing is stored for layer 4; stored are layers \[5\]"):
        checkpointer.get(4)
    with pytest.raises(LayerIndexError):
        checkpointer.get(6)
    checkpointer.clear()
    with pytest.raises(LayerIndexError):
        checkpointer.get(5)


def test_a_huge_layer_number_costs_nothing() -> None:
    checkpointer = ActivationCheckpointer()
    checkpointer.save(10**30, np.ones(1))
    assert checkpointer.get(10**30).tolist() == [1.0]
    assert checkpointer.memory_stored_bytes == 8


@given(chains, configs)
def test_forward_gives_the_chains_output_and_accounts_for_every_byte(
    layers: list[int], config: CheckpointConfig
) -> None:
    checkpointer = ActivationCheckpointer(config)
    forward = Counted()
    input = np.array([[0.5, -2.0]])
    output = checkpointer.checkpointed_forward(input, layers, forward)
    assert forward.calls == layers
    np.testing.assert_array_equal(output, ([input, *outputs_of(input, layers).values()])[-1])
    num_boundaries = sum(checkpointer.is_checkpoint_layer(layer) for layer in layers)
    num_stored = min(num_boundaries, config.max_checkpoints)
    assert state_of(checkpointer) == (num_stored, 16 * num_stored, 16 * (len(layers) - num_stored), 16)
    if num_boundaries <= config.max_checkpoints:
        boundaries = [layer for layer in layers if checkpointer.is_checkpoint_layer(layer)]
        assert stored_layers(checkpointer, layers) == boundaries


@given(chains.filter(bool), configs)
def test_every_layer_can_be_recomputed_bit_for_bit_from_the_nearest_one_stored(
    layers: list[int], config: CheckpointConfig
) -> None:
    checkpointer = ActivationCheckpointer(config)
    input = np.array([0.5, -2.0])
    checkpointer.checkpointed_forward(input, layers, Counted())
    before = state_of(checkpointer)
    stored = stored_layers(checkpointer, layers)
    for position, (layer, expected) in enumerate(outputs_of(input, layers).items()):
        forward = Counted()
        np.testing.assert_array_equal(checkpointer.recompute_from_checkpoint(layer, layers, forward), expected)
        starts = [start + 1 for start in range(position + 1) if layers[start] in stored]
        assert forward.calls == layers[max(starts, default=0) : position + 1]
    assert state_of(checkpointer) == before


@pytest.mark.parametrize(("spread", "longest"), [("binomial", 5), ("even", 4)])
def test_when_full_the_slots_are_spread_over_the_whole_chain(spread: Any, longest: int) -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(1, 5, spread=spread))
    layers = list(range(26))
    checkpointer.checkpointed_forward(np.ones(1), layers, Counted())
    replays = []
    for layer in layers:
        forward = Counted()
        checkpointer.recompute_from_checkpoint(layer, layers, forward)
        replays.append(len(forward.calls))
    assert checkpointer.num_checkpoints == 5
    assert max(replays) == longest


def test_when_full_the_default_spread_is_the_binomial_one() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, 5))
    layers = list(range(24))
    checkpointer.checkpointed_forward(np.ones(1), layers, Counted())
    assert stored_layers(checkpointer, layers) == [state - 1 for state in binomial_states(24, 5)]
    assert stored_layers(checkpointer, layers) == [4, 9, 14, 18, 21]


@pytest.mark.parametrize("config", [CheckpointConfig(0, 64), CheckpointConfig(1, 0)])
def test_without_boundaries_or_slots_everything_is_recomputed_from_the_input(config: CheckpointConfig) -> None:
    checkpointer = ActivationCheckpointer(config)
    input = np.ones(2)
    checkpointer.checkpointed_forward(input, [3, 1, 2], Counted())
    assert checkpointer.num_checkpoints == 0
    forward = Counted()
    recomputed = checkpointer.recompute_from_checkpoint(2, [3, 1, 2], forward)
    assert forward.calls == [3, 1, 2]
    np.testing.assert_array_equal(recomputed, outputs_of(input, [3, 1, 2])[2])


def test_a_second_forward_starts_fresh() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2, 3))
    checkpointer.save(50, np.ones(9))
    checkpointer.checkpointed_forward(np.ones(4), range(5), Counted())
    checkpointer.checkpointed_forward(np.zeros(2), range(3), Counted())
    assert state_of(checkpointer) == (2, 32, 16, 16)
    np.testing.assert_array_equal(checkpointer.get(2), outputs_of(np.zeros(2), [0, 1, 2])[2])
    with pytest.raises(LayerIndexError):
        checkpointer.get(4)


def test_a_forward_function_may_work_in_place() -> None:
    def in_place(activation: Array, layer: int) -> Array:
        activation *= 1.1
        activation += layer
        return activation

    checkpointer = ActivationCheckpointer(CheckpointConfig(2, 3))
    layers = range(9)
    checkpointer.checkpointed_forward(np.ones(2), layers, in_place)
    current = np.ones(2)
    for layer in layers:
        in_place(current, layer)
        for _ in range(2):
            recomputed = checkpointer.recompute_from_checkpoint(layer, layers, in_place)
            np.testing.assert_array_equal(recomputed, current)


def test_the_kept_input_is_a_snapshot_at_full_precision() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(0, 3, use_mixed_precision=True))
    input = np.array([1.23456789])
    checkpointer.checkpointed_forward(input, [0], lambda x, layer: x + 0.0)
    input[:] = 9.0
    assert checkpointer.recompute_from_checkpoint(0, [0], lambda x, layer: x + 0.0).tolist() == [1.23456789]
    assert checkpointer.memory_input_bytes == 8


def test_mixed_precision_rounds_what_is_stored_and_not_what_is_returned() -> None:
    input = np.float32([0.0003, 1e30, -1.1])
    plain, mixed = (ActivationCheckpointer(CheckpointConfig(2, 64, half)) for half in (False, True))
    layers = list(range(7))

    def linear(activation: Array, layer: int) -> Array:
        return activation * np.float32(1.1)

    np.testing.assert_array_equal(
        mixed.checkpointed_forward(input, layers, linear), plain.checkpointed_forward(input, layers, linear)
    )
    assert mixed.memory_stored_bytes * 2 == plain.memory_stored_bytes == 48
    assert mixed.memory_saved_bytes == plain.memory_saved_bytes == 36
    for layer in layers:
        expected = plain.recompute_from_checkpoint(layer, layers, linear)
        # One rounding to 8 bits, and a float32 multiplication.
        recomputed = mixed.recompute_from_checkpoint(layer, layers, linear)
        np.testing.assert_allclose(recomputed, expected, rtol=2**-8 + 2**-22)
        assert recomputed.dtype == np.float32


def test_recompute_names_a_target_that_is_not_in_the_list() -> None:
    checkpointer = ActivationCheckpointer()
    checkpointer.checkpointed_forward(np.ones(1), range(20), Counted())
    with pytest.raises(LayerIndexError, match=r"layer 99 is not among the layers given, \[0, 1, .* 18, 19\]"):
        checkpointer.recompute_from_checkpoint(99, range(20), Counted())


def test_recompute_needs_something_to_start_from() -> None:
    checkpointer = ActivationCheckpointer()
    with pytest.raises(CheckpointMissingError, match="layer 1 cannot be recomputed, as nothing is stored"):
        checkpointer.recompute_from_checkpoint(1, [0, 1], Counted())
    checkpointer.save(1, np.ones(1))
    with pytest.raises(CheckpointMissingError, match=r"layers \[0\] cannot be replayed: no input is kept"):
        checkpointer.recompute_from_checkpoint(0, [0, 1], Counted())
    forward = Counted()
    checkpointer.recompute_from_checkpoint(3, [0, 1, 2, 3], forward)
    assert forward.calls == [2, 3]


def test_recompute_from_the_input_refuses_another_chain_than_the_one_that_ran() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(0))
    checkpointer.checkpointed_forward(np.ones(1), [0, 1, 2], Counted())
    with pytest.raises(InvalidParameterError, match=r"what the last forward pass ran, \[0, 1, 2\]; got \[1\]"):
        checkpointer.recompute_from_checkpoint(1, [1, 2], Counted())
    checkpointer.recompute_from_checkpoint(1, [0, 1], Counted())


@pytest.mark.parametrize("repeated", [[2, 2], [0, 1, 2, 0], np.array([5, 3, 5])])
def test_a_repeated_layer_is_named(repeated: Any) -> None:
    checkpointer = ActivationCheckpointer()
    expected = f"layer {repeated[0]} is repeated in layers"
    with pytest.raises(InvalidParameterError, match=expected):
        checkpointer.checkpointed_forward(np.ones(1), repeated, Counted())
    with pytest.raises(InvalidParameterError, match=expected):
        checkpointer.recompute_from_checkpoint(0, repeated, Counted())


def test_layers_may_be_any_iterable_of_whole_numbers() -> None:
    expected = outputs_of(np.ones(1), [4, 0, 2])[2]
    for layers in [4, 0, 2], (4, 0, 2), np.array([4, 0, 2]), iter([4, 0, 2]), {4: "a", 0: "b", 2: "c"}:
        checkpointer = ActivationCheckpointer()
        np.testing.assert_array_equal(checkpointer.checkpointed_forward(np.ones(1), layers, Counted()), expected)
        assert stored_layers(checkpointer, [4, 0, 2]) == [4, 0]


@pytest.mark.parametrize("wrong", [None, 3, "forward"])
def test_what_is_no_function_is_refused_and_leaves_everything_as_it_was(wrong: Any) -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(2))
    checkpointer.checkpointed_forward(np.ones(1), range(4), Counted())
    before = state_of(checkpointer)
    forward_told = r"forward_fn must be a function, called as forward_fn\(activation, layer\); got "
    with pytest.raises(InvalidParameterError, match=forward_told):
        checkpointer.checkpointed_forward(np.ones(1), range(4), wrong)
    with pytest.raises(InvalidParameterError, match=forward_told):
        checkpointer.recompute_from_checkpoint(3, range(4), wrong)
    with pytest.raises(InvalidParameterError, match=forward_told):
        checkpointer.backward(np.ones(1), range(4), wrong, lambda activation, layer, gradient: gradient)
    with pytest.raises(InvalidParameterError, match=r"vjp_fn must be a function, called as vjp_fn\(activation_in, "):
        checkpointer.backward(np.ones(1), range(4), Counted(), wrong)
    assert state_of(checkpointer) == before


def test_an_empty_chain_returns_its_input() -> None:
    checkpointer = ActivationCheckpointer()
    assert checkpointer.checkpointed_forward(np.ones(2), [], Counted()).tolist() == [1, 1]
    assert state_of(checkpointer) == (0, 0, 0, 16)


class Interruption(BaseException):
    """Not an Exception, like KeyboardInterrupt."""


@given(chains.filter(bool), configs, st.data(), st.sampled_from([ValueError, Interruption]))
def test_a_forward_function_that_raises_leaves_the_checkpointer_as_after_clear(
    layers: list[int], config: CheckpointConfig, data: st.DataObject, error: type[BaseException]
) -> None:
    checkpointer = ActivationCheckpointer(config)
    checkpointer.checkpointed_forward(np.ones(2), layers, Counted())
    failing = data.draw(st.sampled_from(layers))

    def forward(activation: Array, layer: int) -> Array:
        if layer == failing:
            raise error("in the middle")
        return activation + layer

    with pytest.raises(error, match="in the middle"):
        checkpointer.checkpointed_forward(np.ones(2), layers, forward)
    assert state_of(checkpointer) == (0, 0, 0, 0)
    with pytest.raises(LayerIndexError):
        checkpointer.get(0)
    with pytest.raises(CheckpointMissingError):
        checkpointer.recompute_from_checkpoint(layers[0], layers, forward)
    checkpointer.checkpointed_forward(np.ones(2), layers, Counted())
    assert checkpointer.memory_input_bytes == 16


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=3)
)


@given(st.lists(st.tuples(st.sampled_from(["save", "get", "recompute", "forward", "boundary"]), anything, anything)))
def test_whatever_is_given_nothing_but_memfits_errors_escapes(calls: list[tuple[str, Any, Any]]) -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(1, 2))
    for verb, first, second in calls:
        try:
            match verb:
                case "save":
                    checkpointer.save(first, second)
                case "get":
                    checkpointer.get(first)
                case "recompute":
                    checkpointer.recompute_from_checkpoint(first, second, Counted())
                case "forward":
                    checkpointer.checkpointed_forward(np.ones(1), second, Counted())
                case _:
                    checkpointer.is_checkpoint_layer(first)
        except MemfitError:
            pass
        assert checkpointer.num_checkpoints <= 2
