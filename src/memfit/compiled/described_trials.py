"""Describes measured trials of a step with compiled blocks as data: what each partition holds, and each segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from statistics import median

from memfit.compiled.step_segments import Border, MemoryBorders, TimedSegment
from memfit.graph.compiled_data.compiled_blocks import (
    CompiledBlock,
    CompiledKind,
    CompiledProfile,
    MeasuredPartition,
    OutsideChoice,
    Partition,
    SegmentKind,
    StepSegment,
)
from memfit.graph.plan import Plan


@dataclass(slots=True)
class Trial:
    """A step in which every block uses the partition at one place of its kind's menu.

    ``outside`` is a plan for what lies outside blocks, None where all of it is saved.
    """

    partitions: Mapping[str, Partition]
    outside: Plan | None = None
    memory: MemoryBorders = field(init=False)
    timed: list[list[TimedSegment]] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        return median(sum(segment.seconds for segment in run) for run in self.timed)

    def pass_seconds(self, paths: Sequence[str]) -> float:
        """Return the seconds of the passes of the blocks at ``paths``, on average over the blocks."""
        inside = set(paths)
        runs = [sum(segment.seconds for segment in run if segment.path in inside) for run in self.timed]
        return median(runs) / len(paths)


def described(
    kinds: tuple[CompiledKind, ...], listed: Sequence[Trial], plain_seconds: float, outside: Sequence[Trial]
) -> CompiledProfile:
    """Return the measured trials as blocks and segments. Those of ``outside`` differ from the last outside blocks."""
    shape = [(border.kind, border.path) for border in listed[0].memory.borders]
    order = list(dict.fromkeys(path for kind, path in shape if kind is SegmentKind.FORWARD and path is not None))
    place_of = {path: place for place, path in enumerate(order)}
    held = [_held_bytes(trial.memory.borders, order) for trial in listed]
    # What reads the last block's output, such as the loss, may hold it too until the first backward pass of a block.
    least_of_last = min(held_bytes[-1] for held_bytes in held)
    loss = shape.index((SegmentKind.FORWARD, order[-1])) + 1
    besides = [
        trial.memory.borders[loss].peak_bytes - sum(of_trial) for trial, of_trial in zip(listed, held, strict=True)
    ]
    for trial, held_bytes, num_bytes in zip(listed, held, besides, strict=True):
        of_both = min(max(besides) - num_bytes, trial.memory.output_bytes.get(order[-1], 0))
        held_bytes[-1] -= min(held_bytes[-1] - least_of_last, of_both)
    kept = [_keeps_inputs(trial, listed, order) for trial in listed]
    num_held = _num_held(shape, place_of)
    own = [_own_bytes(trial, held_bytes, num_held) for trial, held_bytes in zip(listed, held, strict=True)]
    outputs = [_output_bytes(trial, own, of_trial, shape, order) for trial, of_trial in zip(listed, own, strict=True)]
    # What a block holds because the block before it saves its output depends on the partition of that one.
    alone = [
        [num_bytes - (0 if keeps[place] else output[place - 1]) for place, num_bytes in enumerate(held_bytes)]
        for keeps, held_bytes, output in zip(kept, held, outputs, strict=True)
    ]
    least = [min(of_block) for of_block in zip(*alone, strict=True)]
    base_bytes = [0] * len(shape)
    for place, (segment_kind, path) in enumerate(shape):
        # Outside blocks, what reads a block's output may be running still, and hold it.
        counted = [
            outputs[number][place_of[path]] if path is not None and segment_kind is SegmentKind.BACKWARD else 0
            for number in range(len(listed))
        ]
        most = max(of_trial[place] - output_bytes for of_trial, output_bytes in zip(own, counted, strict=True))
        base_bytes[place] = sum(least[: num_held[place]]) + most
    segments = tuple(
        StepSegment(kind, None if path is None else place_of[path], num_held[place], base_bytes[place])
        for place, (kind, path) in enumerate(shape)
    )
    outside_seconds = min(
        trial.step_seconds - sum(trial.pass_seconds(kind.blocks) * len(kind.blocks) for kind in kinds)
        for trial in listed
    )
    blocks = []
    for place, path in enumerate(order):
        number, kind = next((number, kind) for number, kind in enumerate(kinds) if path in kind.blocks)
        measured = []
        for menu_place in range(len(kind.partitions)):
            trial = listed[menu_place]
            inside = [border for border in trial.memory.borders if border.path == path]
            measured.append(
                MeasuredPartition(
                    held_bytes=alone[menu_place][place] - least[place],
                    forward_bytes=_most_above(inside, SegmentKind.FORWARD),
                    backward_bytes=_most_above(inside, SegmentKind.BACKWARD),
                    output_bytes=outputs[menu_place][place],
                    keeps_input=kept[menu_place][place],
                    seconds=trial.pass_seconds(kind.blocks) + _unexplained(trial, kinds, outside_seconds),
                    saved_sizes=trial.memory.saved_sizes.get(path, ()),
                )
            )
        blocks.append(CompiledBlock(path, number, tuple(measured)))
    choices = tuple(_outside_choice(trial, listed[-1], base_bytes, outside_seconds) for trial in outside)
    return CompiledProfile(kinds, tuple(blocks), segments, outside_seconds, plain_seconds, outside=choices)


def _outside_choice(trial: Trial, least: Trial, base_bytes: Sequence[int], outside_seconds: float) -> OutsideChoice:
    """Return what the plan of ``trial`` changes for each segment, beside the same step with all saved outside."""
    assert trial.outside is not None
    changed = []
    for base, border, other in zip(base_bytes, trial.memory.borders, least.memory.borders, strict=True):
        is_outside = border.kind is SegmentKind.OUTSIDE
        more = border.peak_bytes - other.peak_bytes if is_outside else border.live_bytes - other.live_bytes
        changed.append(base + more)
    seconds = outside_seconds + max(0.0, trial.step_seconds - least.step_seconds)
    return OutsideChoice(trial.outside.recomputed_names, tuple(changed), seconds)


def _unexplained(trial: Trial, kinds: Sequence[CompiledKind], outside_seconds: float) -> float:
    """Return, for each block, its share of what the step takes beyond passes and ``outside_seconds``."""
    paths = list(chain.from_iterable(kind.blocks for kind in kinds))
    explained = outside_seconds + sum(trial.pass_seconds(kind.blocks) * len(kind.blocks) for kind in kinds)
    return (trial.step_seconds - explained) / len(paths)


def _held_bytes(borders: Sequence[Border], order: Sequence[str]) -> list[int]:
    """Return, for each block, what more is live when the next block begins, or the first backward pass."""
    held = []
    for path in order:
        begin = next(place for place, border in enumerate(borders) if border.path == path)
        after = next(border for border in borders[begin + 1 :] if border.kind is not SegmentKind.OUTSIDE)
        held.append(after.live_bytes - borders[begin].live_bytes)
    return held


def _own_bytes(trial: Trial, held_bytes: Sequence[int], num_held: Sequence[int]) -> list[int]:
    """Return what is live in each segment besides what blocks hold: at its beginning, or at most outside blocks."""
    own = []
    for border, count in zip(trial.memory.borders, num_held, strict=True):
        live_bytes = border.peak_bytes if border.kind is SegmentKind.OUTSIDE else border.live_bytes
        own.append(live_bytes - sum(held_bytes[:count]))
    return own


def _output_bytes(
    trial: Trial,
    of_trials: Sequence[Sequence[int]],
    own: Sequence[int],
    shape: Sequence[tuple[SegmentKind, str | None]],
    order: Sequence[str],
) -> list[int]:
    """Return, for each block, what it holds of its own output when nothing else does.

    While the next block's backward pass is to come, that holds the output as well. So it does not count as held by the
    block, and is what more than in other trials is live when the block's own backward pass begins.
    """
    found = []
    for path in order:
        begin = shape.index((SegmentKind.BACKWARD, path))
        more = own[begin] - min(of_trial[begin] for of_trial in of_trials)
        found.append(min(more, trial.memory.output_bytes.get(path, 0)))
    return found


def _keeps_inputs(trial: Trial, trials: Sequence[Trial], order: Sequence[str]) -> list[bool]:
    """Return, for each block, whether it saves any of its inputs that the block before it may save as its outputs."""
    keeps = [True]
    for before, path in pairwise(order):
        may_be_saved = frozenset().union(*(each.memory.saved_outputs.get(before, ()) for each in trials))
        kept = trial.memory.kept_inputs.get(path)
        keeps.append(kept is None or not may_be_saved or not kept.isdisjoint(may_be_saved))
    return keeps


def _num_held(shape: Sequence[tuple[SegmentKind, str | None]], place_of: Mapping[str, int]) -> list[int]:
    """Return how many blocks, the first ones, hold what they saved in each segment.

    Blocks whose passes are not nested in order count as held with all blocks before them.
    """
    num_held, counts, is_held = [], 0, [False] * len(place_of)
    for kind, path in shape:
        counts = max((place + 1 for place, held in enumerate(is_held) if held), default=0)
        num_held.append(counts)
        if path is not None:
            is_held[place_of[path]] = kind is SegmentKind.FORWARD
    return num_held


def _most_above(borders: Sequence[Border], kind: SegmentKind) -> int:
    return max((border.peak_bytes - border.live_bytes for border in borders if border.kind is kind), default=0)
