"""The machine and the versions that numbers came from, as lines for a report. Imports none of the packages it names."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from memfit._version import __version__

_PACKAGES = ("torch", "numpy", "scipy")


def environment_facts() -> dict[str, str]:
    """Return this process's machine and the versions of what memfit stands on, in the order to show them."""
    facts = {
        "Processor": f"{processor_name()}, {os.cpu_count()} cores",
        "System": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "memfit": __version__,
        "Python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def processor_name() -> str:
    """Return what the processor is called by its maker."""
    try:
        # Linux; other systems have no such file, and platform knows theirs.
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (named and named[0]) or platform.processor() or platform.machine()
