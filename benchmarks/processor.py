"""The name of the processor that the numbers were measured on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Return what the system calls the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
