"""Replay records: recorded op calls that can run again, and fetches from the host. `replay.py` says when they run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from memfit.runtime.engine.event_log import log_event
from memfit.runtime.engine.offloading import HostCopies, OffloadedCopy
from memfit.runtime.engine.op_rules import rule_for
from memfit.runtime.engine.values import DroppedUse, DroppedValue, Geometry, tensor_with


class ReplayRecord:
    """One recorded op call: what it takes to run it again and to fill every output that is still referenced.

    ``args`` and ``kwargs`` are the op's, with a `Source` in place of each tensor. ``number`` counts records as they are
    recorded, which is an order in which they can be run; ``lock`` is that of their tape, ``offloading``
    has the offloaded values of the same forward pass.
    """

    __slots__ = ("args", "generator", "generator_state", "kwargs", "lock", "number", "offloading", "op", "outputs")

    def __init__(
        self,
        number: int,
        lock: threading.RLock,
        offloading: HostCopies,
        op: Any,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self.number = number
        self.lock = lock
        self.offloading = offloading
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.outputs: list[tuple[int, weakref.ref[DroppedValue]]] = []
        self.generator: torch.Generator | None = None
        self.generator_state: bytes | None = None

    def dropped_sources(self) -> Iterator[DroppedValue]:
        """Yield the dropped values that the op reads."""
        for argument in (*self.args, *self.kwargs.values()):
            if type(argument) is DroppedUse:
                yield argument.value
            elif type(argument) is list:
                yield from (item.value for item in argument if type(item) is DroppedUse)

    def add_output(self, position: int, geometry: Geometry) -> DroppedValue:
        """Return a new dropped value for the op's output at ``position``."""
        value = DroppedValue(self, geometry)
        self.outputs.append((position, weakref.ref(value)))
        return value

    def draws_from(self, generator: torch.Generator, state: bytes) -> None:
        """Note that the op drew random numbers from ``generator``, which was in ``state``."""
        self.generator = generator
        self.generator_state = state

    def run(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Run the op on ``args`` and ``kwargs``, which hold tensors again, and fill the outputs."""
        log_event(*self.event)
        generator = self.generator
        if generator is None:
            result = self.call(args, kwargs)
        else:
            state_now = state_of(generator)
            assert self.generator_state is not None
            set_state(generator, self.generator_state)
            try:
                result = self.call(args, kwargs)
            finally:
                set_state(generator, state_now)
        for position, reference in self.outputs:
            value = reference()
            if value is not None and value.tensor is None:
                value.fill(result[position] if isinstance(result, (tuple, list)) else result)

    @property
    def event(self) -> tuple[str, ...]:
        """What is logged when the record runs."""
        return "replay", rule_for(self.op).name

    def call(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the op and return its result."""
        return self.op(*args, **kwargs)


def state_of(generator: torch.Generator) -> bytes:
    """Return the generator's state as bytes: a tensor would take memory that plans count."""
    return generator.get_state().numpy().tobytes()


def set_state(generator: torch.Generator, state: bytes) -> None:
    """Let the generator continue from ``state``."""
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class InPlaceRecord(ReplayRecord):
    """An op that wrote to a dropped value: runs on that value, or on a copy if the value has other readers."""

    __slots__ = ()

    def call(self, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        use = self.args[0]
        assert isinstance(use, DroppedUse)
        content = use.value.tensor
        assert content is not None
        if use.value.num_uses > 1:
            size, stride, _, dtype, _, _ = use.value.geometry
            content = torch.empty_strided(size, stride, dtype=dtype, device=content.device).copy_(content)
            # Arguments that share the rewritten storage must see the write, as they did in the forward pass.
            for position, argument in enumerate(self.args):
                if isinstance(argument, DroppedUse) and argument.value is use.value:
                    args[position] = tensor_with(argument.geometry, content)
        self.op(*args, **kwargs)
        return content


class OverwriteRecord(ReplayRecord):
    """An op that overwrote a whole storage: runs on a new one."""

    __slots__ = ("device", "geometry")

    geometry: Geometry
    device: torch.device

    def call(self, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        size, stride, _, dtype, _, _ = self.geometry
        canvas = torch.empty_strided(size, stride, dtype=dtype, device=self.device)
        self.op(canvas, *args[1:], **kwargs)
        return canvas


class FetchRecord(ReplayRecord):
    """Runs nothing: an offloaded value is fetched from the host's memory."""

    __slots__ = ("copy", "geometry")

    def __init__(
        self, number: int, lock: threading.RLock, offloading: HostCopies, copy: OffloadedCopy, geometry: Geometry
    ) -> None:
        super().__init__(number, lock, offloading, None, [], {})
        self.copy = copy
        self.geometry = geometry

    @property
    def event(self) -> tuple[str, ...]:
        return ("fetch",)

    def call(self, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        return tensor_with(self.geometry, self.copy.fetch())
