"""``profile``: measures one real training step."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from memfit.capture.blocks import find_blocks
from memfit.capture.calibration import calibrated
from memfit.capture.kept_state import KeptState
from memfit.capture.layer_types import layer_type_of
from memfit.capture.recorder import StepRecorder
from memfit.capture.scopes import ModuleScopes
from memfit.capture.step import Loss, forward, loss_of
from memfit.errors import InvalidParameterError
from memfit.graph.model_profile import Block, ModelProfile, RecordedOp, RecordedValue
from memfit.graph.names import is_within
from memfit.layers.profile import LayerMemoryProfile
from memfit.runtime.call_arguments import tensors_in
from memfit.runtime.fingerprint import fingerprint_of
from memfit.runtime.forward_wrapping import is_wrapped
from memfit.runtime.ledger import peak_of

_NUM_TIMED_STEPS = 3


def profile(model: nn.Module, batch: Any, *, loss: Loss | None = None) -> ModelProfile:
    """Measure one training step of ``model`` on ``batch`` and describe it as data.

    A tuple or list is passed as ``model(*batch)``, a dict as ``model(**batch)``, anything else as ``model(batch)``.
    ``loss(output)`` gives the scalar to differentiate; without it, the output's own loss, the output itself where it is
    a scalar, or the mean of its floating tensors. The model is left as it was: weights, buffers, gradients, random
    number generators, and the counters and caches its modules keep.
    """
    _refuse_unfit(model)
    device = _device_of(model, batch)
    scopes = ModuleScopes()
    recorder = StepRecorder(scopes, model)

    def recorded_step() -> None:
        with scopes.watching(model), recorder.recording():
            value = loss_of(forward(model, batch), loss)
        value.backward()

    def plain_step() -> None:
        loss_of(forward(model, batch), loss).backward()

    state = KeptState(model, batch)
    with state.kept():
        recorded_step()
    with state.kept():
        peak_bytes = peak_of(plain_step, device, held=_tensors_of(model, batch))
    seconds = []
    for _ in range(_NUM_TIMED_STEPS):
        with state.kept():
            seconds.append(_seconds_of(plain_step, device))
    ops, values = tuple(recorder.ops), tuple(recorder.values)
    measured = ModelProfile(
        ops=ops,
        values=values,
        blocks=_blocks(model, list(scopes.seen), ops, values),
        peak_bytes=peak_bytes,
        step_seconds=median(seconds),
        device=str(device),
        fingerprint=fingerprint_of(model),
    )
    return calibrated(measured, model, batch, loss, state)


def _blocks(
    model: nn.Module, called: list[str], ops: tuple[RecordedOp, ...], values: tuple[RecordedValue, ...]
) -> tuple[Block, ...]:
    return tuple(
        Block(path, _layer(layer_idx, path, ops, values)) for layer_idx, path in enumerate(find_blocks(model, called))
    )


def _layer(
    layer_idx: int, path: str, ops: tuple[RecordedOp, ...], values: tuple[RecordedValue, ...]
) -> LayerMemoryProfile:
    inside = [op for op in ops if op.module is not None and is_within(op.module, path)]
    made = {index for op in inside for index in op.outputs if index is not None}
    return LayerMemoryProfile(
        layer_idx=layer_idx,
        layer_type=layer_type_of([op.op for op in inside]),
        activation_size_bytes=sum(values[index].num_bytes for index in made if values[index].is_saved),
        recompute_flops=sum(op.flops for op in inside),
    )


def _seconds_of(step: Any, device: torch.device) -> float:
    _wait_for(device)
    begin = time.perf_counter()
    step()
    _wait_for(device)
    return time.perf_counter() - begin


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _tensors_of(model: nn.Module, batch: Any) -> list[Tensor]:
    return [*model.parameters(), *model.buffers(), *tensors_in(batch)]


def _device_of(model: nn.Module, batch: Any) -> torch.device:
    for tensor in _tensors_of(model, batch):
        return tensor.device
    return torch.device("cpu")


def _refuse_unfit(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidParameterError(f"model is a torch.nn.Module, got {type(model).__name__}")
    if any(is_wrapped(module) for module in model.modules()):
        raise InvalidParameterError(
            f"a plan is at work on this {type(model).__name__} (or on a part of it); remove() it before profiling"
        )
