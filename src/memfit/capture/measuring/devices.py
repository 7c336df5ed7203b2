"""What is to be known of the device that a step runs on: which it is, how much memory it has and how much is free."""

from __future__ import annotations

import os

import torch

from memfit.capture.measuring.host_memory import free_host_bytes
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
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None, None
    return total_bytes, free_host_bytes()
