"""Builds whole steps at real sizes: forward ops are given, lifetimes, saves and the backward pass follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from memfit.graph.layer_profile import LayerMemoryProfile, LayerTypeHint
from memfit.graph.model_profile import Block, ModelProfile, Phase, RecordedOp, RecordedValue, Replay, Save

# About what one H200 sustains in bf16; only the ratio of the two matters for a plan.
FLOPS_PER_SECOND = 6e14
BYTES_PER_SECOND = 3.5e12


class StepBuilder:
    """Collects the ops of a forward pass and turns them into a `ModelProfile` of the whole step."""

    def __init__(self) -> None:
        self._ops: list[RecordedOp] = []
        self._values: list[RecordedValue] = []
        self._saved_by: dict[int, list[int]] = {}
        self._parameters: set[int] = set()
        self._num_calls: Counter[tuple[str | None, str]] = Counter()
        self._blocks: list[str] = []

    def batch(self, num_bytes: int) -> int:
        return self._value("batch", num_bytes, None, len(self._values))

    def parameter(self, name: str, num_bytes: int) -> int:
        index = self._value(name, num_bytes, None, len(self._values))
        self._parameters.add(index)
        return index

    def block(self, path: str) -> str:
        self._blocks.append(path)
        return path

    def op(
        self,
        module: str | None,
        name: str,
        inputs: Sequence[int],
        out_bytes: int | Sequence[int] = (),
        *,
        saves: Sequence[int] = (),
        saves_outputs: Sequence[int] = (),
        flops: int = 0,
        in_place: bool = False,
        replay: Replay = Replay.YES,
    ) -> list[int]:
        """Add an op; ``saves`` are values, ``saves_outputs`` positions. In place, it rewrites its first input."""
        index, op_name = len(self._ops), f"aten.{name}"
        call = self._num_calls[module, op_name]
        self._num_calls[module, op_name] += 1
        sizes = (
            [self._values[inputs[0]].num_bytes]
            if in_place
            else [out_bytes]
            if isinstance(out_bytes, int)
            else out_bytes
        )
        outputs = []
        for position, num_bytes in enumerate(sizes):
            text = f"{module if module is not None else '(loss)'}::{op_name}#{call}" + (
                f".{position}" if position else ""
            )
            storage = self._values[inputs[0]].storage if in_place else len(self._values)
            outputs.append(self._value(text, num_bytes, index, storage))
        for value in (*saves, *(outputs[position] for position in saves_outputs)):
            self._saved_by.setdefault(value, []).append(index)
        moved = sum(self._values[value].num_bytes for value in (*inputs, *outputs))
        seconds = max(flops / FLOPS_PER_SECOND, moved / BYTES_PER_SECOND) + 2e-6
        rewrites = (inputs[0],) if in_place else ()
        self._ops.append(
            RecordedOp(
                module,
                op_name,
                call,
                tuple(dict.fromkeys(inputs)),
                tuple(outputs),
                rewrites,
                flops,
                replay,
                seconds=seconds,
            )
        )
        return outputs

    def _value(self, name: str, num_bytes: int, op_index: int | None, storage: int) -> int:
        self._values.append(RecordedValue(name, num_bytes, op_index, storage))
        return len(self._values) - 1

    def finish(self, fingerprint: str) -> ModelProfile:
        """Add the backward pass, one op for each of the forward pass in reverse, and return the step."""
        num_forward = len(self._ops)
        backward_of = {index: 2 * num_forward - 1 - index for index in range(num_forward)}
        last_use = {}
        for index, op in enumerate(self._ops):
            for value in (*op.inputs, *op.outputs):
                assert value is not None
                last_use[self._values[value].storage] = index
        for value in range(len(self._values)):
            recorded = self._values[value]
            saves = tuple(Save(backward_of[op], backward_of[op], op) for op in reversed(self._saved_by.get(value, [])))
            dies_after = None if recorded.op_index is None else last_use[recorded.storage]
            self._values[value] = replace(recorded, dies_after=dies_after, saves=saves)
        has_gradient: set[int] = set()
        for index in range(num_forward - 1, -1, -1):
            self._add_backward_of(index, backward_of, has_gradient)
        return ModelProfile(
            ops=tuple(self._ops),
            values=tuple(self._values),
            blocks=tuple(self._layer(number, path) for number, path in enumerate(self._blocks)),
            peak_bytes=0,
            step_seconds=sum(op.seconds for op in self._ops),
            device="cuda:0",
            fingerprint=fingerprint,
        )

    def _add_backward_of(self, index: int, backward_of: dict[int, int], has_gradient: set[int]) -> None:
        forward = self._ops[index]
        here = len(self._ops)
        outputs = []
        for value in forward.inputs:
            recorded = self._values[value]
            is_parameter = value in self._parameters
            if recorded.op_index is None and not is_parameter:
                continue
            if is_parameter:
                dies_after = None
            else:
                assert recorded.op_index is not None
                # A second gradient of a value is added to the first at once.
                dies_after = here if value in has_gradient else backward_of[recorded.op_index]
            has_gradient.add(value)
            self._values.append(
                RecordedValue(
                    f"(backward)::{forward.op}#{len(self._values)}",
                    recorded.num_bytes,
                    here,
                    len(self._values),
                    dies_after=dies_after,
                )
            )
            outputs.append(len(self._values) - 1)
        self._ops.append(
            RecordedOp(
                None,
                f"{forward.op}_backward",
                0,
                (),
                tuple(outputs),
                (),
                2 * forward.flops,
                Replay.NO_GRAD,
                phase=Phase.BACKWARD,
                seconds=2 * forward.seconds,
            )
        )

    def _layer(self, number: int, path: str) -> Block:
        inside = [
            i for i, op in enumerate(self._ops) if op.module is not None and f"{op.module}.".startswith(f"{path}.")
        ]
        made = {output for index in inside for output in self._ops[index].outputs if output is not None}
        return Block(
            path,
            LayerMemoryProfile(
                number,
                LayerTypeHint.OTHER,
                sum(self._values[value].num_bytes for value in made if self._values[value].is_saved),
                sum(self._ops[index].flops for index in inside),
            ),
        )
