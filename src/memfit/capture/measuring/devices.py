"""What is to be known of the device that a step runs on: which it is, how much memory it has and how much is free."""

from __future__ import annotations

import os

import torch

from memfit.capture.training_step import TrainingStep


def device_of(step: TrainingStep) -> torch.device:
    """Return the device of the model's first parameter, or else of the batch."""
    for _, tensor in step.tensors():
        return tensor.device
    return torch.device("cpu")


def memory_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Return all the memory of ``device``, and what this process can have of it; None where that is not known."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        # What the caching allocator has reserved is not free to others, but it is to this process.
        return total_bytes, free_bytes + torch.cuda.memory_reserved(device)
    try:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return page_bytes * os.sysconf("SC_PHYS_PAGES"), _available_bytes(page_bytes)
    except (AttributeError, OSError, ValueError):
        return None, None


def _available_bytes(page_bytes: int) -> int:
    """Return the host's memory that is free, or would be where the system gave up what it keeps of files."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return page_bytes * os.sysconf("SC_AVPHYS_PAGES")
