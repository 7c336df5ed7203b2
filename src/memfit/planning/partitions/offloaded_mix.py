"""Which blocks offload what they save: the first of the step, which have the most time until their backward pass.

Copies to the host run beside the next block's forward pass, copies back beside the backward pass of the block after, as
many bytes ahead as the largest block sends (the window). So a block that offloads holds less between its forward and
its backward pass, while more bytes are live when copies run::

    held bytes                      − what leaves
    the next block's forward bytes  + what leaves, and in between
    backward bytes                  + what the block itself fetches + what is fetched ahead for the blocks before it
    between two backward passes     + what is fetched ahead

A block sends the first few of its saved tensors within some sizes. Blocks that send as many bytes with several
partitions may use any of these. Blocks changed in this way are mixed by the same dynamic program as others. Waiting
for the link is that of `memfit.planning.step.link_time`. Tried are a few sizes and numbers of tensors with each entry
of the menu, and a few numbers of blocks that offload.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from memfit.graph.compiled_data.compiled_blocks import (
    CompiledBlock,
    CompiledProfile,
    MeasuredPartition,
    SegmentKind,
    SentTensors,
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
    """A choice of partitions, and for the blocks that offload which tensors leave."""

    choice: Choice
    offloaded: Mapping[str, SentTensors]
    peak_bytes: int
    seconds: float
    host_bytes: int


@dataclass(frozen=True, slots=True)
class _Sending:
    """Which blocks send how many bytes, and what each block may choose from: places in the menu of its kind."""

    tensors: SentTensors
    sent: tuple[int, ...]
    menus: tuple[tuple[int, ...], ...]


def mixes_within(
    profile: CompiledProfile, budget_bytes: int, host_bytes: int, link: Link, unthrottled_share: float
) -> Iterator[OffloadedMix]:
    """Yield mixes that offload, each the fastest within ``budget_bytes`` for its blocks that do."""
    for sending in _sendings(profile.blocks):
        mix = PartitionMix(_offloading(profile, sending))
        chosen = mix.fastest_within(budget_bytes)
        if chosen is None:
            continue
        choice = tuple(menu[place] for menu, place in zip(sending.menus, chosen, strict=True))
        senders = [
            (block, sending.tensors.among(block.measured[number].saved_sizes))
            for block, number, num_bytes in zip(profile.blocks, choice, sending.sent, strict=False)
            if num_bytes
        ]
        # torch rounds pinned blocks up to powers of two.
        taken_bytes = sum(1 << (size - 1).bit_length() for _, sizes in senders for size in sizes)
        if taken_bytes > host_bytes:
            continue
        waiting = expected_waiting(link, _copies(mix, chosen, sending.sent), unthrottled_share)
        offloaded = {block.path: sending.tensors for block, _ in senders}
        seconds = mix.seconds(chosen) + sum(waiting)
        yield OffloadedMix(choice, offloaded, mix.peak_bytes(chosen), seconds, taken_bytes)


def _sendings(blocks: Sequence[CompiledBlock]) -> Iterator[_Sending]:
    """Yield the ways for the first blocks to offload that are tried, each once."""
    # The last block would fetch at once what it has just sent.
    most = len(blocks) - 1
    num_entries = max((len(block.measured) for block in blocks), default=0)
    tried: set[tuple[int, ...]] = set()
    for number, tensors in product(range(num_entries), _tensors_tried(blocks)):
        of_all = tuple(sum(tensors.among(_entry(block, number).saved_sizes)) for block in blocks[:most])
        if of_all in tried:
            continue
        tried.add(of_all)
        menus = [_menu_of(block, tensors, num_bytes) for block, num_bytes in zip(blocks, of_all, strict=False)]
        everything = [tuple(range(len(block.measured))) for block in blocks]
        for count in range(most, 0, -max(1, -(-most // _MOST_COUNTS))):
            if any(of_all[:count]):
                yield _Sending(tensors, of_all[:count], (*menus[:count], *everything[count:]))


def _tensors_tried(blocks: Sequence[CompiledBlock]) -> list[SentTensors]:
    """Return a few sizes of saved tensors, the largest first, each with a few numbers of tensors, the most first."""
    saved = [each.saved_sizes for block in blocks for each in block.measured]
    ordered = sorted({size for sizes in saved for size in sizes}, reverse=True)
    tried = []
    for smallest_bytes in ordered[:: max(1, -(-len(ordered) // _MOST_SIZES))]:
        # Those of this size alone, and the larger ones as well.
        for largest_bytes in dict.fromkeys((ordered[0], smallest_bytes)):
            most = max(sum(smallest_bytes <= size <= largest_bytes for size in sizes) for sizes in saved)
            # All, and one, two, four and so on.
            counts = {most, *(1 << power for power in range(most.bit_length()))}
            tried += [SentTensors(smallest_bytes, largest_bytes, count) for count in sorted(counts, reverse=True)]
    return tried


def _entry(block: CompiledBlock, number: int) -> MeasuredPartition:
    return block.measured[min(number, len(block.measured) - 1)]


def _menu_of(block: CompiledBlock, tensors: SentTensors, num_bytes: int) -> tuple[int, ...]:
    """Return the entries with which the block sends so many bytes; all where it sends none, for it then does not."""
    return tuple(
        number
        for number, each in enumerate(block.measured)
        if not num_bytes or sum(tensors.among(each.saved_sizes)) == num_bytes
    )


def _offloading(profile: CompiledProfile, sending: _Sending) -> CompiledProfile:
    """Return the step as it is measured where the first blocks send so many bytes each."""
    window = max(sending.sent)
    sent = [*sending.sent, *[0] * (len(profile.blocks) + 1 - len(sending.sent))]
    count = 1 + max(place for place, num_bytes in enumerate(sent) if num_bytes)
    ahead = [min(window, sum(sent[:place])) for place in range(len(sent))]
    blocks = []
    for place, (block, menu) in enumerate(zip(profile.blocks, sending.menus, strict=True)):
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
            for each in (block.measured[number] for number in menu)
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
