"""Finds, in one step, the values that do not replay bit for bit.

Kernels that bypass the dispatcher (raw Triton or C++) write where no one is told. So the engine itself is run, with
every value dropped that it believes it can bring back, but with the originals kept: backward is given the originals,
and what the replay made is compared with them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from memfit.capture.bits import same_bits
from memfit.capture.kept_state import KeptState
from memfit.capture.step import TrainingStep
from memfit.graph.model_profile import ModelProfile
from memfit.graph.names import is_within
from memfit.planning.planner import plan_of_all_that_replays
from memfit.runtime.apply import Applied
from memfit.runtime.op_rules import OpRule
from memfit.runtime.recipes import Recipe
from memfit.runtime.regions import DropPattern, Region
from memfit.runtime.replay import read
from memfit.runtime.tape import Tape
from memfit.runtime.values import DroppedUse

# Each trial finds the first values of a chain that differ; models with more than a few links of such are not known.
_MAX_TRIALS = 6


class OpOutput(NamedTuple):
    """An output of the ``number``-th call of an op in a region, which is how the engine knows it."""

    region: str
    op: str
    number: int
    position: int = 0


def calibrated(profile: ModelProfile, step: TrainingStep, state: KeptState) -> ModelProfile:
    """Return ``profile`` with the values marked that do not come back as they were.

    What differs makes all that is replayed from it differ too. So only the first ones are marked, and with those saved,
    the step is tried again, until all that is still dropped comes back.
    """
    for _ in range(_MAX_TRIALS):
        differing: set[OpOutput] = set()
        plan = plan_of_all_that_replays(profile)
        with state.kept(), Applied(step.model, plan, functools.partial(CalibratingTape, differing)):
            step.run_forward_and_backward()
        values = {index for output in differing for index in _values_of(profile, output)}
        if not values:
            return profile
        profile = _marked(profile, _first_among(values, profile))
    return _marked(profile, values)


def _values_of(profile: ModelProfile, output: OpOutput) -> list[int]:
    """Return the values that ``output`` may be: one, or where this step called the op more often, all of its calls'."""
    calls = [
        op for op in profile.ops if op.op == output.op and op.module is not None and is_within(op.module, output.region)
    ]
    chosen = calls[output.number : output.number + 1] or calls
    return [index for op in chosen if (index := op.outputs[output.position]) is not None]


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
        replace(value, comes_back=False) if index in marked else value for index, value in enumerate(profile.values)
    )
    return replace(profile, values=values)


class _Both(NamedTuple):
    use: DroppedUse
    original: Tensor
    output: OpOutput


class CalibratingTape(Tape):
    """A tape that keeps what it drops, and adds to ``differing`` the outputs that came back otherwise."""

    def __init__(self, differing: set[OpOutput]) -> None:
        super().__init__()
        self._differing = differing
        self._this_call: OpOutput | None = None
        self._num_calls_of: dict[tuple[str, str], int] = defaultdict(int)
        self._call_of_recipe: dict[int, OpOutput] = {}

    def _next_pattern(self, region: Region | None, rule: OpRule) -> DropPattern:
        assert region is not None
        number = self._num_calls_of[region.path, rule.name]
        self._num_calls_of[region.path, rule.name] += 1
        self._this_call = OpOutput(region.path, rule.name, number)
        return super()._next_pattern(region, rule)

    def _new_recipe_number(self) -> int:
        number = super()._new_recipe_number()
        assert self._this_call is not None
        self._call_of_recipe[number] = self._this_call
        return number

    def _pack(self, tensor: Tensor) -> Any:
        packed = super()._pack(tensor)
        if type(packed) is not DroppedUse:
            return packed
        recipe = packed.value.recipe
        assert isinstance(recipe, Recipe)
        position = next(position for position, value in recipe.outputs if value() is packed.value)
        call = self._call_of_recipe[recipe.number]
        return _Both(packed, tensor.detach(), call._replace(position=position))

    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is not _Both:
            return super()._unpack(packed)
        if not same_bits(read(packed.use), packed.original):
            self._differing.add(packed.output)
        return packed.original
