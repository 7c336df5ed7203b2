"""What an allocator counts for a buffer that a step makes, which may be more than the buffer takes.

CUDA's caching allocator cuts a block of the wanted size off a free one only if more than 1 MiB would be left of it;
else it hands out the whole block, and counts all of it. Where all large sizes are multiples of 1 MiB, nothing is ever
left over. Where they are not, 0.3 to 0.65 MiB were counted too much for each large buffer that was live at the peak
(H200, torch 2.11: ViT-L and ResNet-152, planned without this margin and measured once), and nothing on Mixtral, whose
sizes are such multiples. How it falls out depends on what was freed before, so that a budget needs a margin. With it,
``benchmarks/frontier.py`` has predicted and measured peaks side by side. The GPT's steps took exactly 1 MiB more than
the profiled one there, the plain one too: a little is left for such.
"""

from __future__ import annotations

_MIB = 2**20
_MARGIN_BYTES = _MIB * 7 // 10

STEP_MARGIN_BYTES = 2 * _MIB
"""What a step on a GPU may take more than the profiled one took."""


def counted_bytes(num_bytes: int) -> int:
    """Return what CUDA's allocator may count for a buffer of ``num_bytes``, already rounded up as it rounds."""
    return num_bytes if num_bytes <= _MIB or num_bytes % _MIB == 0 else num_bytes + _MARGIN_BYTES
