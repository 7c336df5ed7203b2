"""What an allocator counts for a buffer that a step makes, which may be more than the buffer takes.

CUDA's caching allocator cuts a block of the wanted size off a free one only if more than 1 MiB would be left of it;
else it hands out the whole block, and counts all of it. Where all large sizes are multiples of 1 MiB, nothing is ever
left over. Where they are not, up to 1 MiB is counted too much for each large buffer that is live at the peak, and how
much depends on what was freed before: plans of ResNet-152 on an H200 (torch 2.11) took 48 MiB for 51 such buffers in
one run and 12 MiB for 50 in another, 70 MiB for about 83, and 65 to 104 MiB for about 230. A budget needs a margin for
that: a share of 1 MiB for each, for they are never all so unlucky, and some for the step, for a few of them may be.
Each leaves two ends at most at which that can happen, its own and that of what it was cut off from: a step that makes
two such buffers, as Mixtral does, does not need as much. With it, ``benchmarks/frontier.py`` has predicted and measured
peaks side by side. The GPT's steps took exactly 1 MiB more than the profiled one there, the plain one too: a little is
left for such.
"""

from __future__ import annotations

from collections.abc import Iterable

_MIB = 2**20
_MARGIN_BYTES = _MIB * 6 // 10
_LARGEST_UNEVEN_STEP_MARGIN_BYTES, _STEP_MARGIN_BYTES_OF_UNEVEN = 20 * _MIB, 2 * _MIB
_STEP_MARGIN_BYTES = 2 * _MIB


def counted_bytes(num_bytes: int) -> int:
    """Return what CUDA's allocator may count for a buffer of ``num_bytes``, already rounded up as it rounds."""
    return num_bytes + _MARGIN_BYTES if _is_uneven(num_bytes) else num_bytes


def step_margin_bytes(sizes: Iterable[int]) -> int:
    """Return what a step on a GPU, which makes buffers of these sizes, may take beyond that."""
    for_uneven_ones = sum(map(_is_uneven, sizes)) * _STEP_MARGIN_BYTES_OF_UNEVEN
    return _STEP_MARGIN_BYTES + min(for_uneven_ones, _LARGEST_UNEVEN_STEP_MARGIN_BYTES)


def _is_uneven(num_bytes: int) -> bool:
    return num_bytes > _MIB and num_bytes % _MIB != 0
