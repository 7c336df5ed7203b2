"""The activation checkpointer: runs a chain of layers, holds some activations, recomputes the others.

It serves chains in any array library. A checkpoint, here, is what is stored. How it is held is up to
``array_snapshot`` and ``half_storage``; where and in which order, up to ``revolve`` and ``backward_sweep``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from memfit.errors import (
    CheckpointCapacityError,
    CheckpointMissingError,
    InvalidParameterError,
    LayerIndexError,
)
from memfit.layers.checkpointing.array_snapshot import HeldArray, num_bytes_of, snapshot
from memfit.layers.checkpointing.backward_sweep import Forward, Free, Restore, Reverse, Store, backward_sweep
from memfit.layers.checkpointing.half_storage import hold_in_half
from memfit.layers.checkpointing.layer_numbers import layer_number, layer_numbers, listed
from memfit.layers.checkpointing.revolve import binomial_states, even_states
from memfit.validation import refuse_no_function, shown, whole_number

ForwardFn = Callable[[Any, int], Any]
VjpFn = Callable[[Any, int, Any], Any]

_FORWARD_CALL = "forward_fn(activation, layer)"
_VJP_CALL = "vjp_fn(activation_in, layer, grad_out)"


@dataclass(frozen=True)
class CheckpointConfig:
    """Which activations a checkpointer stores.

    ``checkpoint_every_n_layers`` makes each layer whose number is a multiple of it a boundary; 0 means no
    layer is. ``max_checkpoints`` is the number of slots. ``use_mixed_precision`` stores checkpoints in 16
    bits a number, with a relative error of at most 2**-8 (``memfit.layers.checkpointing.half_storage`` has the whole
    promise).

    ``spread`` says where checkpoints stand when a forward pass has more boundaries than slots.
    ``"binomial"`` is best for a backward sweep: forward and backward together make the fewest forward calls
    possible, ``revolve.forward_calls(num_layers, max_checkpoints)``. ``"even"`` is best for single
    recomputations: the longest replay is as short as it can be, one call less than (num_layers + 1) /
    (max_checkpoints + 1) rounded up.
    """

    checkpoint_every_n_layers: int = 4
    max_checkpoints: int = 64
    use_mixed_precision: bool = False
    spread: Literal["binomial", "even"] = "binomial"

    def __post_init__(self) -> None:
        for name in ("checkpoint_every_n_layers", "max_checkpoints"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name, maximum=None))
        if not isinstance(self.use_mixed_precision, bool):
            raise InvalidParameterError(
                f"use_mixed_precision must be True or False; got {shown(self.use_mixed_precision)}"
            )
        if self.spread not in ("binomial", "even"):
            raise InvalidParameterError(f"spread must be 'binomial' or 'even'; got {shown(self.spread)}")


class ActivationCheckpointer:
    """Stores some of a chain's activations in a forward pass and recomputes the others from them.

    A checkpoint is a snapshot: a later change of the array that was handed in does not reach it, and what
    comes out of ``get``, a replay or a sweep belongs to the caller. Arrays that can change are copied for
    that, once on the way in and once on the way out. The forward function may therefore work in place.

    The input of the last forward pass is kept beside the slots, always at full precision, until ``clear``
    or the next forward pass; ``memory_input_bytes`` is its size, and neither ``num_checkpoints`` nor
    ``memory_stored_bytes`` counts it.
    """

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        if config is None:
            config = CheckpointConfig()
        if not isinstance(config, CheckpointConfig):
            raise InvalidParameterError(f"config must be a CheckpointConfig; got {shown(config)}")
        self._config = config
        self.clear()

    @property
    def config(self) -> CheckpointConfig:
        """The configuration, which never changes."""
        return self._config

    @property
    def num_checkpoints(self) -> int:
        """The number of slots in use, never above ``max_checkpoints``."""
        return len(self._slots)

    @property
    def memory_stored_bytes(self) -> int:
        """The bytes held in the slots now."""
        return sum(held.nbytes for held in self._slots.values())

    @property
    def memory_saved_bytes(self) -> int:
        """The bytes of those layer outputs that the last forward pass did not store."""
        return self._saved_bytes

    @property
    def memory_input_bytes(self) -> int:
        """The bytes of the kept input, 0 when no forward pass has been run since ``clear``."""
        return 0 if self._input is None else self._input.nbytes

    def clear(self) -> None:
        """Let go of every checkpoint and of the input, and count from zero."""
        self._slots: dict[int, HeldArray] = {}
        self._highest_layer_saved = -1
        self._saved_bytes = 0
        self._input: HeldArray | None = None
        self._chain: tuple[int, ...] = ()

    def is_checkpoint_layer(self, layer_idx: int) -> bool:
        """Whether the layer is a boundary: by its number, not by its place in a list."""
        layer = layer_number(layer_idx, "layer_idx")
        interval = self._config.checkpoint_every_n_layers
        return interval != 0 and layer % interval == 0

    def save(self, layer_idx: int, activation: Any) -> None:
        """Store a layer's output, over an earlier one of the same layer; any layer may be stored.

        Raises ``CheckpointCapacityError`` when every slot holds another layer; the store is then as it was.
        """
        layer = layer_number(layer_idx, "layer_idx")
        num_bytes_of(activation, f"the activation of layer {layer}")
        if layer not in self._slots and len(self._slots) >= self._config.max_checkpoints:
            raise CheckpointCapacityError(
                f"no slot for layer {layer}: max_checkpoints is {self._config.max_checkpoints}, and stored "
                f"are layers {listed(sorted(self._slots))}; raise max_checkpoints, or clear()"
            )
        self._store(layer, activation)

    def get(self, layer_idx: int) -> Any:
        """A stored activation, in its own type and shape, as an array of the caller's own.

        Raises ``LayerIndexError`` above the highest layer saved since ``clear``, else
        ``CheckpointMissingError``.
        """
        layer = layer_number(layer_idx, "layer_idx")
        if layer > self._highest_layer_saved:
            known = f"up to {self._highest_layer_saved}" if self._highest_layer_saved >= 0 else "none"
            raise LayerIndexError(f"layer {layer} is beyond the layers saved so far ({known}); save it first")
        if layer not in self._slots:
            raise CheckpointMissingError(
                f"nothing is stored for layer {layer}; stored are layers {listed(sorted(self._slots))}, "
                "and recompute_from_checkpoint gives the others"
            )
        return self._slots[layer].value()

    def checkpointed_forward(self, input: Any, layers: Iterable[int], forward_fn: ForwardFn) -> Any:
        """Run ``forward_fn(activation, layer)`` over the layers, in the list's order; return the last output.

        Each forward pass starts fresh. Boundaries are stored where all of them fit the slots; else as many
        states as there are slots, placed as ``config.spread`` says. When ``forward_fn`` raises, or returns
        something that is no array, the checkpointer is left as after ``clear``; a wrong ``layers``, ``input``
        or ``forward_fn`` leaves it untouched.
        """
        chain = layer_numbers(layers)
        num_bytes_of(input, "the input")
        refuse_no_function(forward_fn, "forward_fn", _FORWARD_CALL)
        to_store = self._layers_to_store(chain)
        self.clear()
        try:
            self._input = snapshot(input)
            self._chain = chain
            activation = input
            for layer in chain:
                activation = forward_fn(activation, layer)
                num_bytes = num_bytes_of(activation, f"what forward_fn returned for layer {layer}")
                if layer in to_store:
                    self._store(layer, activation)
                else:
                    self._saved_bytes += num_bytes
        except BaseException:
            self.clear()
            raise
        return activation

    def recompute_from_checkpoint(self, target_layer: int, layers: Iterable[int], forward_fn: ForwardFn) -> Any:
        """The output of ``target_layer``, replayed from the nearest stored layer at or before it.

        "Before" is by the list's order. Where none is stored, the replay starts from the kept input, and
        ``layers`` must then begin like the list that the forward pass ran. The store stays as it is. A stored
        target costs no forward call.
        """
        target = layer_number(target_layer, "target_layer")
        chain = layer_numbers(layers)
        refuse_no_function(forward_fn, "forward_fn", _FORWARD_CALL)
        if self._input is None and not self._slots:
            raise CheckpointMissingError(
                f"layer {target} cannot be recomputed, as nothing is stored; run checkpointed_forward first"
            )
        if target not in chain:
            raise LayerIndexError(
                f"layer {target} is not among the layers given, {listed(chain)}; ask for one of these"
            )
        stop = chain.index(target) + 1
        stored = [position for position in range(stop) if chain[position] in self._slots]
        if stored:
            start = stored[-1] + 1
            activation = self._slots[chain[start - 1]].value()
        else:
            start = 0
            activation = self._input_of(chain[:stop]).value()
        for layer in chain[start:stop]:
            activation = forward_fn(activation, layer)
        return activation

    def backward(self, grad_output: Any, layers: Iterable[int], forward_fn: ForwardFn, vjp_fn: VjpFn) -> Any:
        """Sweep the gradient back through the chain of the last forward pass and return the input's gradient.

        ``vjp_fn(activation_in, layer, grad_out)`` returns the gradient with regard to the layer's input,
        ``activation_in``; missing activations are recomputed by ``forward_fn``. ``layers`` must be the list
        that the forward pass ran.

        The sweep uses up the checkpoints: a slot is reused as soon as its layer is passed, and empty slots
        hold what a replay will need again, so a segment that fits them is replayed once. The input stays,
        so a second sweep is possible and starts from there. When a function raises, what is stored is still
        right, and the sweep can be repeated.
        """
        chain = layer_numbers(layers)
        refuse_no_function(forward_fn, "forward_fn", _FORWARD_CALL)
        refuse_no_function(vjp_fn, "vjp_fn", _VJP_CALL)
        kept_input = self._input_of(chain, whole=True)
        state_of = {layer: state for state, layer in enumerate(chain, start=1)}
        stored = sorted(state_of[layer] for layer in self._slots if layer in state_of)
        # A layer saved by hand that is not of this chain keeps its slot.
        num_slots = self._config.max_checkpoints - (len(self._slots) - len(stored))
        activation: Any = None
        gradient = grad_output
        for action in backward_sweep(len(chain), num_slots, stored):
            match action:
                case Restore(state):
                    activation = (kept_input if state == 0 else self._slots[chain[state - 1]]).value()
                case Free(state):
                    del self._slots[chain[state - 1]]
                case Forward(start, stop):
                    for layer in chain[start:stop]:
                        activation = forward_fn(activation, layer)
                case Store(state):
                    num_bytes_of(activation, f"what forward_fn returned for layer {chain[state - 1]}")
                    self._store(chain[state - 1], activation)
                case Reverse(position):
                    gradient = vjp_fn(activation, chain[position], gradient)
        return gradient

    def _store(self, layer: int, activation: Any) -> None:
        self._slots[layer] = (hold_in_half if self._config.use_mixed_precision else snapshot)(activation)
        self._highest_layer_saved = max(self._highest_layer_saved, layer)

    def _layers_to_store(self, chain: tuple[int, ...]) -> frozenset[int]:
        boundaries = frozenset(layer for layer in chain if self.is_checkpoint_layer(layer))
        num_slots = self._config.max_checkpoints
        if len(boundaries) <= num_slots:
            return boundaries
        states = (even_states if self._config.spread == "even" else binomial_states)(len(chain), num_slots)
        return frozenset(chain[state - 1] for state in states)

    def _input_of(self, chain: tuple[int, ...], *, whole: bool = False) -> HeldArray:
        """The kept input, given that it is the input of ``chain``: of its beginning, unless ``whole``."""
        if self._input is None:
            raise CheckpointMissingError(
                f"layers {listed(chain)} cannot be replayed: no input is kept; run checkpointed_forward first"
            )
        if chain != (self._chain if whole else self._chain[: len(chain)]):
            raise InvalidParameterError(
                f"layers must be what the last forward pass ran, {listed(self._chain)}; got {listed(chain)}"
            )
        return self._input
