"""How much of the host's memory is free to this process. Reads files of the operating system; no torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return how much memory this process could still take; 0 where the system does not report it.

    ``root`` is where the files of the system lie. Files that are cached count as free, because they make room when
    memory is asked for. A container may have less than its host.
    """
    free_bytes = _available_bytes(root / "proc/meminfo")
    if free_bytes is None:
        free_bytes = _unused_bytes()
    return max(0, min([free_bytes, *_rooms_of_cgroups(root)]))


def _available_bytes(meminfo: Path) -> int | None:
    return _bytes_after("MemAvailable:", meminfo, unit_bytes=1024)


def _unused_bytes() -> int:
    """Return what nothing is in, not even a cached file: less than can be had."""
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return 0


def _rooms_of_cgroups(root: Path) -> list[int]:
    """Return what is left in each of the control groups (v2) that this process is in, of those that have a limit."""
    top = root / "sys/fs/cgroup"
    inner = top
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, _, place = line.split(":", 2)
            # Groups of the first version have numbers from 1, and other files.
            if number == "0":
                inner = top / place.lstrip("/")
    rooms = []
    for group in (inner, *inner.parents):
        limit_bytes, used_bytes = _number_in(group / "memory.max"), _number_in(group / "memory.current")
        if limit_bytes is not None and used_bytes is not None:
            cached_bytes = _bytes_after("inactive_file ", group / "memory.stat") or 0
            rooms.append(limit_bytes - used_bytes + cached_bytes)
        if group == top:
            break
    return rooms


def _number_in(file: Path) -> int | None:
    """Return the number in ``file``; None where there is none, as where a limit is "max"."""
    with suppress(OSError, ValueError):
        return int(file.read_text(encoding="utf-8"))
    return None


def _bytes_after(name: str, file: Path, unit_bytes: int = 1) -> int | None:
    """Return the number behind ``name`` in the lines of ``file``, in bytes."""
    with suppress(OSError, ValueError, IndexError):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return int(line[len(name) :].split()[0]) * unit_bytes
    return None
