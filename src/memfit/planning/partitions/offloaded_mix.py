"""Which blocks offload what they save: the first of the step, which have the most time until their backward pass.

Copies to the host run beside the next block's forward pass, copies back beside the backward pass of the block after, as
many bytes ahead as the largest block sends (the window). So a block that offloads holds less between its forward and
its backward pass, while more bytes are live when copies run::

    held bytes                      − what leaves
    the next block's forward bytes  + what leaves, and in between
    backward bytes                  + what the block itself fetches + what is fetched ahead for the blocks before it
    between two backward passes     + what is fetched ahead

Blocks changed in this way are mixed by the same dynamic program as others. The waiting for the link is that of
`memfit.planning.step.link_time`. Tried are all entries of the menu for the blocks that offload, a few numbers of such
blocks, and a few sizes from which on tensors leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memfit.graph.compiled_data.compiled_blocks import (
    CompiledBlock,
    CompiledProfile,
    MeasuredPartition,
    SegmentKind,
    StepSegment,
)
from memfit.graph.model_profile import Link
from memfit.planning.partitions.partition_mix import Choice, PartitionMix
from memfit.planning.step.link_time import Arrival, Copies, Departure, expected_waiting

# Of a block's two passes, about so much is forward.
_FORWARD_SHARE = 1 / 3
_MOST_SIZES = 4
_MOST_COUNTS = 8


@dataclass(frozen=True, slots=True)
class OffloadedMix:
    """A choice of partitions, and for the blocks that offload the bytes from which on tensors leave."""

    choice: Choice
    offloaded: Mapping[str, int]
    peak_bytes: int
    seconds: float
    host_bytes: int


def mixes_within(
    profile: CompiledProfile, budget_bytes: int, host_bytes: int, link: Link, unthrottled_share: float
) -> Iterator[OffloadedMix]:
    """Yield mixes that offload, each the fastest within ``budget_bytes`` for its blocks that do."""
    most = len(profile.blocks) - 1
    for number in range(max((len(block.measured) for block in profile.blocks), default=0)):
        for smallest_bytes in _sizes(profile.blocks, number):
            # A few numbers of blocks. The last block would immediately fetch what it has just sent.
            for count in range(most, 0, -max(1, -(-most // _MOST_COUNTS))):
                sent = _bytes_sent(profile.blocks[:count], number, smallest_bytes)
                taken_bytes = _host_bytes(profile.blocks[:count], number, smallest_bytes)
                if not 0 < taken_bytes <= host_bytes:
                    continue
                mix = PartitionMix(_offloading(profile, number, sent))
                choice = mix.fastest_within(budget_bytes)
                if choice is None:
                    continue
                waiting = expected_waiting(link, _copies(mix, choice, sent), unthrottled_share)
                # The blocks that offload have one partition to choose from.
                places = tuple(
                    min(number, len(block.measured) - 1) if place < count and sent[place] else choice[place]
                    for place, block in enumerate(profile.blocks)
                )
                offloaded = {profile.blocks[place].path: smallest_bytes for place, own in enumerate(sent) if own}
                seconds = mix.seconds(choice) + sum(waiting)
                yield OffloadedMix(places, offloaded, mix.peak_bytes(choice), seconds, taken_bytes)


def _sizes(blocks: Sequence[CompiledBlock], number: int) -> list[int]:
    """Return a few sizes of saved tensors, the largest first."""
    ordered = sorted({size for block in blocks for size in _measured(block, number).saved_sizes}, reverse=True)
    return ordered[:: max(1, -(-len(ordered) // _MOST_SIZES))]


def _measured(block: CompiledBlock, number: int) -> MeasuredPartition:
    return block.measured[min(number, len(block.measured) - 1)]


def _sizes_sent(block: CompiledBlock, number: int, smallest_bytes: int) -> list[int]:
    return [size for size in _measured(block, number).saved_sizes if size >= smallest_bytes]


def _bytes_sent(blocks: Sequence[CompiledBlock], number: int, smallest_bytes: int) -> list[int]:
    return [sum(_sizes_sent(block, number, smallest_bytes)) for block in blocks]


def _host_bytes(blocks: Sequence[CompiledBlock], number: int, smallest_bytes: int) -> int:
    """Return what is taken of the host's memory: torch rounds pinned blocks up to powers of two."""
    return sum(1 << (size - 1).bit_length() for block in blocks for size in _sizes_sent(block, number, smallest_bytes))


def _offloading(profile: CompiledProfile, number: int, sent: Sequence[int]) -> CompiledProfile:
    """Return the step as it is measured where the first blocks send so many bytes each."""
    window = max(sent)
    sent = [*sent, *[0] * (len(profile.blocks) + 1 - len(sent))]
    count = 1 + max(place for place, num_bytes in enumerate(sent) if num_bytes)
    ahead = [min(window, sum(sent[:place])) for place in range(len(sent))]
    blocks = []
    for place, block in enumerate(profile.blocks):
        own, before = sent[place], sent[place - 1] if place else 0
        # Copies back begin with the backward pass of the block after the last one that offloads.
        fetched = own + ahead[place] if place <= count else 0
        measured = tuple(
            replace(
                each,
                held_bytes=each.held_bytes - own,
                forward_bytes=each.forward_bytes + before,
                backward_bytes=each.backward_bytes + fetched,
            )
            for each in ((_measured(block, number),) if own else block.measured)
        )
        blocks.append(replace(block, measured=measured))
    return replace(profile, blocks=tuple(blocks), segments=_with_copies(profile.segments, sent, ahead, count))


def _with_copies(
    segments: Sequence[StepSegment], sent: Sequence[int], ahead: Sequence[int], count: int
) -> tuple[StepSegment, ...]:
    """Return the segments outside blocks with what is live there because it is being copied."""
    changed = []
    is_backward = False
    for segment in segments:
        is_backward = is_backward or segment.kind is SegmentKind.BACKWARD
        held = segment.num_held
        if segment.kind is not SegmentKind.OUTSIDE:
            copied = 0
        elif is_backward:
            copied = ahead[held] if held <= count else 0
        else:
            copied = sent[held - 1] if held else 0
        changed.append(replace(segment, base_bytes=segment.base_bytes + copied))
    return tuple(changed)


def _copies(mix: PartitionMix, choice: Choice, sent: Sequence[int]) -> Copies:
    """Return when copies start and what waits for them."""
    blocks = mix.profile.blocks
    seconds = [block.measured[number].seconds for block, number in zip(blocks, choice, strict=True)]
    departures = []
    now = 0.0
    for place, num_bytes in enumerate(sent):
        now += _FORWARD_SHARE * seconds[place]
        departures.append(Departure(now, num_bytes, [place - 1] if place else []))
    forward_seconds = _FORWARD_SHARE * sum(seconds)
    now = forward_seconds + mix.profile.outside_seconds
    arrivals = []
    for place in reversed(range(len(blocks))):
        if place <= len(sent):
            started = [place - 1] if place else []
            arrivals.append(Arrival(now, started, [place] if place < len(sent) else []))
        now += (1 - _FORWARD_SHARE) * seconds[place]
    return Copies(departures, forward_seconds, arrivals, mix.seconds(choice))
