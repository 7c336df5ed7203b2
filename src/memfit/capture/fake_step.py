"""Profiles a step without running it: fake tensors have shapes and types, and neither numbers nor memory.

Times are estimates, from a roofline that is measured on the device. Kernels do not run, so what they take for
themselves is not known, except for what matrix libraries keep all the time. Nothing is tried with the engine, so values
are believed to come back bit for bit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memfit.capture.fake_substitutes import fake_tensors_in
from memfit.capture.measuring.devices import device_of, memory_bytes
from memfit.capture.measuring.fused_costs import with_fused_replays
from memfit.capture.measuring.link import measured_link
from memfit.capture.measuring.other_memory import let_libraries_allocate, other_memory
from memfit.capture.measuring.roofline import Roofline
from memfit.capture.recording.measured_blocks import measured_blocks
from memfit.capture.recording.opaque_parts import opaque_parts
from memfit.capture.recording.plain_timeline import plain_timeline_bytes
from memfit.capture.recording.recorded_runs import record_step
from memfit.capture.recording.step_recording import values_of
from memfit.capture.state.kept_state import KeptState
from memfit.capture.training_step import TrainingStep
from memfit.distributed.wrapped_models import bare_model
from memfit.errors import MemfitError
from memfit.graph.model_profile import ModelProfile
from memfit.runtime.applying.fingerprint import fingerprint_of
from memfit.runtime.applying.model_inputs import noting_inputs
from memfit.runtime.native.native_library import configured_module
from memfit.runtime.torch_internals import (
    FAKE_TENSOR_LOG,
    DataDependentOutputException,
    DispatchMode,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)


def profile_of_fake_step(step: TrainingStep) -> ModelProfile:
    """Return the profile of ``step`` from a run of it that takes no memory; the model may be on the meta device."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_tensors_in(step, functools.partial(_fake_of, fake_mode)):
        return _profile_of(_with_fake_batch(step, fake_mode), fake_mode)


def _profile_of(fake: TrainingStep, fake_mode: FakeTensorMode) -> ModelProfile:
    """Return the profile of the ``fake`` step, which has fake tensors."""
    device = device_of(fake)
    state = KeptState(fake)
    with _explained_limits(), fake_mode, _StepIsFake(fake_mode):
        if fake.optimizer is not None or fake.arguments.step is not None or fake.arguments.gradients == "kept":
            # These runs create the optimizer's state and the gradients.
            while not state.is_warm:
                with state.kept():
                    fake.run()
        with state.kept(), noting_inputs(fake.model) as inputs:
            recording, called = record_step(fake, device, _is_real)
    roofline_device = _device_to_measure(device)
    roofline = Roofline.of_device(
        roofline_device, {fact.dtype for fact in recording.facts if fact.flops and fact.dtype}
    )
    ops = tuple(
        replace(op, seconds=roofline.seconds_of(fact)) for op, fact in zip(recording.ops, recording.facts, strict=True)
    )
    values = values_of(recording)
    ops = with_fused_replays(ops, recording.facts, values, roofline.bytes_per_second)
    if device.type == "cuda":
        let_libraries_allocate(device)
        values += (other_memory(values, torch.cuda.memory_allocated(device)),)
    device_bytes, free_bytes = memory_bytes(roofline_device)
    return ModelProfile(
        ops=ops,
        values=values,
        blocks=measured_blocks(bare_model(fake.model), called, ops, values),
        peak_bytes=max(plain_timeline_bytes(ops, values)),
        step_seconds=sum(op.seconds for op in ops),
        device=str(roofline_device),
        fingerprint=fingerprint_of(fake.model),
        device_bytes=device_bytes,
        free_bytes=free_bytes,
        measured_with="fake tensors and a roofline of the device",
        inputs=tuple(inputs),
        module_calls=recording.module_calls,
        link=measured_link(roofline_device),
        notes=opaque_parts(bare_model(fake.model), recording),
    )


def _with_fake_batch(step: TrainingStep, fake_mode: FakeTensorMode) -> TrainingStep:
    """Return ``step`` with a batch and targets of fake tensors."""
    try:
        with fake_mode, _StepIsFake(fake_mode):
            batch, targets = copy.deepcopy((step.batch, step.arguments.targets))
    except Exception as error:
        raise MemfitError(
            "the batch cannot be copied, which profiling with fake tensors needs "
            f"({type(error).__name__}: {error}); use mode='real'"
        ) from error
    return TrainingStep(step.model, replace(step.arguments, batch=batch, targets=targets), warns=step.warns)


def _fake_of(fake_mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    is_number = _is_host_number(tensor) and not isinstance(tensor, nn.Parameter)
    return _fake_number(tensor, fake_mode) if is_number else fake_mode.from_tensor(tensor)


# They add a bias or a mask to a product in place, but not where a mode is active, as that of fake tensors is.
_ADDING_IN_PLACE = (
    nn.functional.linear,
    nn.functional.multi_head_attention_forward,
    nn.functional.scaled_dot_product_attention,
    torch.gru,
    torch.rnn_relu,
    torch.rnn_tanh,
)


class _AddsInPlace(DispatchMode):
    """Lets such a function run the ops of a real step, which the engine in C++ records."""

    _last_made: Tensor | None = None

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.add.Tensor and args[0] is self._last_made:
            op = torch.ops.aten.add_.Tensor
        result = op(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._last_made = result
        return result


class _StepIsFake(TorchFunctionMode):
    """Makes deep copies have fake tensors: those of batches, of any class, and those that a step makes.

    torch's own deep copy of a fake tensor that knows its number fails inside the mode. A single random number on the
    host, by which layers are dropped at random, is a known one.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self._fake_mode = fake_mode

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _ADDING_IN_PLACE and not torch.compiler.is_compiling() and configured_module() is not None:
            with _AddsInPlace():
                return function(*args, **(kwargs or {}))
        if function is torch.rand:
            return _known_number(function(*args, **(kwargs or {})))
        if function is not Tensor.__deepcopy__:
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) in memo:
            return memo[id(tensor)]
        if isinstance(tensor, FakeTensor):
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        else:
            with unset_fake_temporarily():
                # An attribute that an earlier step computed has a history, which no step goes back into.
                known = tensor if tensor.is_leaf else tensor.detach()
            memo[id(tensor)] = self._fake_mode.from_tensor(known)
        return memo[id(tensor)]


def _is_host_number(state: Tensor) -> bool:
    return state.dim() == 0 and state.device.type == "cpu"


def _fake_number(state: Tensor, fake_mode: FakeTensorMode) -> Tensor:
    """Return a fake tensor that knows its number, as those do that are made from one inside the mode."""
    number = state.item()
    with fake_mode:
        return torch.tensor(number, dtype=state.dtype)


def _known_number(drawn: Tensor) -> Tensor:
    """Return the largest random number in the place of a single one on the host: layers are dropped where it is small.

    So the step is the one that drops none, which takes most.
    """
    if drawn.numel() != 1 or drawn.device.type != "cpu":
        return drawn
    return torch.tensor(1 - torch.finfo(drawn.dtype).eps, dtype=drawn.dtype).reshape(drawn.shape)


def _is_real(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor)


@contextmanager
def _explained_limits() -> Iterator[None]:
    was_disabled = FAKE_TENSOR_LOG.disabled
    FAKE_TENSOR_LOG.disabled = True
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise MemfitError(
            f"the step reads numbers out of a tensor ({error.func}), and fake tensors have none; use mode='real', or "
            "let the model take that branch without looking at the numbers"
        ) from error
    except MemfitError:
        raise
    except Exception as error:
        raise MemfitError(
            f"the step could not be run on fake tensors ({type(error).__name__}: {error}); use mode='real'"
        ) from error
    finally:
        FAKE_TENSOR_LOG.disabled = was_disabled


def _device_to_measure(device: torch.device) -> torch.device:
    """Return the device whose rates are to be measured: that of the model, or the one it would be trained on."""
    if device.type != "meta":
        return device
    # What torch was built for need not be there.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator
