"""Finds, in trial steps, the values that do not replay bit for bit.

Kernels that bypass the dispatcher (raw Triton or C++) write without a record of it. So the engine itself is run, with
values dropped that it believes it can bring back, but with the originals kept: the step goes on with the originals, and
what the replay made is compared with them.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memfit.calibration.trial_plans import plan_of_all_that_replays, plan_of_what_leaves_blocks
from memfit.capture.state.bits import same_bits
from memfit.capture.state.kept_state import KeptState
from memfit.capture.training_step import TrainingStep
from memfit.graph.model_profile import ModelProfile, Phase
from memfit.graph.outline import Address
from memfit.graph.plan import Plan
from memfit.runtime.applying.apply import Applied
from memfit.runtime.engine.call_arguments import is_strided, tensors_in
from memfit.runtime.engine.op_rules import OpRule, Treatment, rule_for
from memfit.runtime.engine.planned_modules import FatePattern
from memfit.runtime.engine.replay import read
from memfit.runtime.engine.tape import Tape
from memfit.runtime.engine.values import NOTES, DroppedUse, DroppedValue, Source, geometry_of

# Each trial finds the first values of a chain that differ; models with more than a few links of such are not known.
_MAX_TRIALS = 6


class OpOutput(NamedTuple):
    """An output of an op call, which the engine knows by its address."""

    address: Address
    position: int = 0


def with_inexact_replays_marked(profile: ModelProfile, step: TrainingStep, state: KeptState) -> ModelProfile:
    """Return ``profile`` with the values marked that do not replay bit-exactly.

    First all values inside blocks are tried, replayed from what enters the block; then those that leave blocks, which
    are compared wherever they are read, since autograd need not save what other replays may start from.
    """
    profile = _tried(profile, step, state, plan_of_all_that_replays, CalibratingTape)
    return _tried(profile, step, state, plan_of_what_leaves_blocks, ReadCheckingTape)


def _tried(
    profile: ModelProfile,
    step: TrainingStep,
    state: KeptState,
    plan_for: Callable[[ModelProfile], Plan],
    tape: type[CalibratingTape],
) -> ModelProfile:
    """Return ``profile`` with the values marked that did not replay bit-exactly in steps by ``plan_for`` of it.

    What differs makes all that is replayed from it differ too. So only the first ones are marked, and with those saved,
    the step is tried again, until all values that are still dropped replay bit-exactly.
    """
    values: set[int] = set()
    for _ in range(_MAX_TRIALS):
        plan = plan_for(profile)
        if not any(step.ranks.gathered(plan.recorded_modules)):
            return profile
        differing: set[OpOutput] = set()
        new_tape = functools.partial(tape, differing)
        with state.kept(), Applied(step.model, plan, new_tape, warns_of_calls=False):
            step.run_forward_and_backward()
        differing = set().union(*step.ranks.gathered(differing))
        values = _values_of(profile, differing, plan)
        if not any(step.ranks.gathered(bool(values))):
            return profile
        profile = _marked(profile, _first_among(values, profile))
    return _marked(profile, values)


def _values_of(profile: ModelProfile, differing: set[OpOutput], plan: Plan) -> set[int]:
    """Return the values at the addresses of ``differing``; where this step called an op more often, all of its calls'.

    Several values have one address where the step has several backward passes.
    """
    assert plan.outline is not None
    ops = [op for op in profile.ops if op.phase is Phase.FORWARD and op.module is not None and op.has_gradients]
    by_address: dict[OpOutput, set[int]] = defaultdict(set)
    for op, address in zip(ops, plan.outline.addresses(plan.recorded_modules), strict=True):
        if address is not None:
            for position, index in enumerate(op.outputs):
                if index is not None:
                    by_address[OpOutput(address, position)].add(index)
    values: set[int] = set()
    for output in differing:
        module, _, op_name, _ = output.address
        alike = (known for known in by_address if (known[0].module, known[0].op) == (module, op_name))
        values |= by_address.get(output) or {index for known in alike for index in by_address[known]}
    return values


def _first_among(values: set[int], profile: ModelProfile) -> set[int]:
    """Return those of ``values`` that are not made from others of them."""
    tainted = set(values)
    first = set(values)
    for op in profile.ops:
        if not tainted.isdisjoint(op.inputs):
            made = {index for index in op.outputs if index is not None}
            tainted |= made
            first -= made
    return first


def _marked(profile: ModelProfile, marked: set[int]) -> ModelProfile:
    values = tuple(
        replace(value, replays_exactly=False) if index in marked else value
        for index, value in enumerate(profile.values)
    )
    return replace(profile, values=values)


class _Both(NamedTuple):
    use: DroppedUse
    original: Tensor


class CalibratingTape(Tape):
    """A tape that keeps what it drops, and adds to ``differing`` the outputs that do not replay bit-exactly."""

    def __init__(self, differing: set[OpOutput]) -> None:
        super().__init__()
        self._differing = differing
        self._this_call: Address | None = None
        self._output_of: weakref.WeakKeyDictionary[DroppedValue, OpOutput] = weakref.WeakKeyDictionary()

    def _next_pattern(self, rule: OpRule) -> FatePattern:
        assert self._frame is not None
        self._this_call = self._frame.address_of_next(rule.name)
        return super()._next_pattern(rule)

    def _drop(self, storage: torch.UntypedStorage, value: DroppedValue, version: int) -> None:
        assert self._this_call is not None
        assert value.record is not None
        position = next(position for position, output in value.record.outputs if output() is value)
        self._output_of[value] = OpOutput(self._this_call, position)
        super()._drop(storage, value, version)

    def _source(self, tensor: Tensor, rule: OpRule) -> Source:
        self._note_if_lost(tensor)
        return super()._source(tensor, rule)

    def _note_if_lost(self, tensor: Tensor) -> None:
        """A write that versions do not count (``tensor.data.add_``) makes the engine hold what it had dropped."""
        note = NOTES.of(tensor.untyped_storage()) if is_strided(tensor) else None
        if note is None or note.tape_token is not self._token or note.dropped is None:
            return
        if tensor._version != note.version:
            self._differing.add(self._output_of[note.dropped])

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) in (Tensor, nn.Parameter):
            self._note_if_lost(tensor)
        packed = super()._pack(tensor)
        return _Both(packed, tensor.detach()) if type(packed) is DroppedUse else packed

    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is not _Both:
            return super()._unpack(packed)
        self._compare(packed.use, packed.original)
        return packed.original

    def _compare(self, use: DroppedUse, original: Tensor) -> None:
        if not same_bits(read(use), original):
            self._differing.add(self._output_of[use.value])


class ReadCheckingTape(CalibratingTape):
    """One that compares a dropped value at every op that reads it, not only where autograd saves it."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A view reads nothing, and is how a raw kernel gets hold of the memory that it is about to write.
        if not types and rule_for(op).treatment is not Treatment.VIEW:
            for tensor in tensors_in([args, kwargs or {}]):
                note = NOTES.of(tensor.untyped_storage()) if is_strided(tensor) else None
                value = note.content(tensor) if note is not None and note.tape_token is self._token else None
                if value is not None:
                    self._compare(DroppedUse(value, geometry_of(tensor)), tensor)
        return super().__torch_dispatch__(op, types, args, kwargs)
