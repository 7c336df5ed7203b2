"""Whether replayed ops are fused on this machine, and the kernels of each of its devices.

``MEMFIT_FUSE=0`` has all ops replayed one by one.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch

from memfit.runtime.fusing.cuda_functions import built_function, cuda_libraries, launch_now, launcher_address
from memfit.runtime.fusing.fused_kernels import CUDA, FusedKernels

_FIRST_WITH_BF16 = (8, 0)
"""The compute capability from which on GPUs have instructions for these numbers."""


def start_fusing(native: Any) -> None:
    """Let the engine in C++ fuse what it replays on CUDA devices, where that is possible."""
    if can_fuse_on("cuda"):
        native.fuse_on("cuda", launcher_address(), _kernel_of)


def can_fuse_on(device_type: str) -> bool:
    """Return whether there can be kernels for devices of this type. Initializes no device, which would break forks."""
    if device_type != "cuda" or os.environ.get("MEMFIT_FUSE") == "0":
        return False
    return torch.version.cuda is not None and cuda_libraries() is not None


def _kernel_of(device_index: int, program: str) -> int | None:
    """Return the kernel, 0 if there is none (ops are then replayed one by one), None to ask again later."""
    if torch.cuda.is_current_stream_capturing():
        # Building tries the kernel on the device, which must not become part of the captured graph.
        return None
    if "bf16" in program and torch.cuda.get_device_capability(device_index) < _FIRST_WITH_BF16:
        return 0
    try:
        return _kernels_on(device_index).kernel_of(program)
    except RuntimeError as error:
        warnings.warn(
            f"no kernel could be built that replays several ops at once ({error}); they are replayed one by one, "
            "which takes longer. MEMFIT_FUSE=0 asks for that",
            stacklevel=2,
        )
        return 0


@functools.cache
def _kernels_on(device_index: int) -> FusedKernels:
    device = torch.device("cuda", device_index)
    return FusedKernels(device, lambda source: built_function(source, device), launch_now, CUDA)
