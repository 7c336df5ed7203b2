"""What one recorded run of a step left: its ops and values by number, when storages died, what autograd saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from memfit.graph.model_profile import ModuleCall, Phase, RecordedOp, RecordedValue, Save


@dataclass(slots=True)
class SeenSave:
    """One save by autograd, made in ``module`` before the op at ``seen_before``. The rest is filled in later."""

    value: int
    seen_before: int
    module: str | None
    read_before: int | None = None
    released_after: int | None = None


class FusedFacts(NamedTuple):
    """What determines the time of an op that is replayed in one kernel with its neighbours: the bytes that it moves.

    ``reads`` has the value behind each tensor that it reads, None where it has none. ``gains_alone`` says that a kernel
    is faster than torch's own even for this op by itself.
    """

    reads: tuple[tuple[int | None, int], ...]
    made_bytes: int
    gains_alone: bool


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What determines the time of an op: its signature (equal ones take the same time), its work and its precision.

    ``is_answer`` says that the host waits for what it returns. ``fused`` is there where it may be replayed in one
    kernel with others.
    """

    signature: Any
    flops: int
    moved_bytes: int
    dtype: torch.dtype | None
    is_answer: bool = False
    fused: FusedFacts | None = None


@dataclass(slots=True)
class Recording:
    """One run of a step, as it is written. ``reads`` are the places in ``saves`` of those read, in that order.

    ``values`` are as they are first seen. ``left_after`` is after which op the program let go of a storage that
    autograd held longer.
    """

    ops: list[RecordedOp] = field(default_factory=list)
    facts: list[OpFacts] = field(default_factory=list)
    values: list[RecordedValue] = field(default_factory=list)
    saves: list[SeenSave] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    died_after: dict[int, int] = field(default_factory=dict)
    left_after: dict[int, int] = field(default_factory=dict)
    outside: list[torch.Tensor] = field(default_factory=list)
    num_storages: int = 0
    module_calls: tuple[ModuleCall, ...] = ()
    # Whether the forward pass ran ops on DTensors, whose values are not recorded.
    has_dtensors: bool = False
    # The kinds of tensors without an own storage that autograd saved in the forward pass.
    opaque_saves: set[str] = field(default_factory=set)
    # Outermost modules that ran once more in the backward pass.
    recomputed_modules: tuple[str, ...] = ()
    # Whether the model returned keys and values for later calls.
    returns_cache: bool = False


def values_of(recording: Recording) -> tuple[RecordedValue, ...]:
    """Return the values of the step."""
    died_after = recording.died_after | recording.left_after
    read_places = _read_places(recording)
    saves: dict[int, list[Save]] = {}
    for number, save in enumerate(recording.saves):
        saves.setdefault(save.value, []).append(
            Save(
                op_index=_saving_op(save, recording.ops),
                read_place=read_places.get(number, 0),
                read_before=len(recording.ops) if save.read_before is None else save.read_before,
                released_after=len(recording.ops) - 1 if save.released_after is None else save.released_after,
            )
        )
    return tuple(
        replace(
            value, dies_after=died_after.get(value.storage), saves=tuple(sorted(saves.get(index, ()), key=_when_used))
        )
        for index, value in enumerate(recording.values)
    )


def always_saved(values: Sequence[RecordedValue], indices: Collection[int]) -> tuple[RecordedValue, ...]:
    """Return ``values`` with those at ``indices`` marked as ones that no plan drops."""
    return tuple(
        replace(value, replays_exactly=value.replays_exactly and index not in indices)
        for index, value in enumerate(values)
    )


def _read_places(recording: Recording) -> dict[int, int]:
    """Return the place of each save's read among those before the same op."""
    num_reads: Counter[int | None] = Counter()
    places = {}
    for number in recording.reads:
        time = recording.saves[number].read_before
        places[number] = num_reads[time]
        num_reads[time] += 1
    return places


def _saving_op(save: SeenSave, ops: list[RecordedOp]) -> int | None:
    """Return the op for whose sake autograd saved: it saves inputs just before an op runs, results just after."""
    following = ops[save.seen_before] if save.seen_before < len(ops) else None
    if (
        following is not None
        and following.phase is Phase.FORWARD
        and following.module == save.module
        and save.value in following.inputs
    ):
        return save.seen_before
    # What saves without an op, as the arguments of torch.utils.checkpoint are, may come after an op of another module.
    is_known = save.seen_before and ops[save.seen_before - 1].module == save.module
    return save.seen_before - 1 if is_known else None


def _when_used(save: Save) -> tuple[int, int, int]:
    return save.read_before, save.read_place, save.released_after
