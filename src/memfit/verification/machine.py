"""Describes the machine, for results that were measured on it."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """Return what ``device`` is called by its maker, and how many threads torch uses where it is the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        num_threads = torch.get_num_threads()
        return f"{_processor_name()}, {num_threads} thread{'s' if num_threads > 1 else ''}"
    return str(device)


def _processor_name() -> str:
    try:
        # Linux; other systems have no such file, and platform knows theirs.
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
