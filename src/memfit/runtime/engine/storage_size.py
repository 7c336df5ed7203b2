"""What a storage takes of a device's memory."""

from __future__ import annotations

import torch
from torch import Tensor

# The CUDA caching allocator hands out multiples of this many bytes.
CUDA_GRANULARITY_BYTES = 512


def storage_bytes_on(device: torch.device, tensor: Tensor) -> int:
    """Return what the storage of ``tensor`` takes of the memory of ``device``: 0 where it lies elsewhere."""
    if tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
        return 0
    num_bytes = tensor.untyped_storage().nbytes()
    return -(-num_bytes // CUDA_GRANULARITY_BYTES) * CUDA_GRANULARITY_BYTES if device.type == "cuda" else num_bytes
