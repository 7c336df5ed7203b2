"""How much of the host's memory is free: what the system says of itself, of cached files, and of containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memfit.capture.measuring.host_memory import free_host_bytes

MIB = 2**20


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Return the root of a host of which 100 MiB are free with what files take there."""
    put(tmp_path / "proc/meminfo", "MemTotal: 409600 kB\nMemFree: 1024 kB\nMemAvailable:     102400 kB\n")
    return tmp_path


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def put_group(folder: Path, limit: str, current: int, stat: str = "anon 5\n") -> None:
    put(folder / "memory.max", f"{limit}\n")
    put(folder / "memory.current", f"{current}\n")
    put(folder / "memory.stat", stat)


def test_what_cached_files_take_is_free(host: Path) -> None:
    assert free_host_bytes(host) == 100 * MIB


def test_a_container_may_have_less(host: Path) -> None:
    put(host / "proc/self/cgroup", "0::/\n")
    put_group(host / "sys/fs/cgroup", str(50 * MIB), 20 * MIB)
    assert free_host_bytes(host) == 30 * MIB
    put_group(host / "sys/fs/cgroup", str(50 * MIB), 20 * MIB, stat="anon 5\ninactive_file 1048576\nfile 9\n")
    assert free_host_bytes(host) == 31 * MIB
    put_group(host / "sys/fs/cgroup", str(500 * MIB), 20 * MIB)
    assert free_host_bytes(host) == 100 * MIB
    put_group(host / "sys/fs/cgroup", str(50 * MIB), 51 * MIB)
    assert free_host_bytes(host) == 0


def test_the_tightest_of_the_groups_around_a_process_counts(host: Path) -> None:
    # Of the first version's groups there may be some beside, under other numbers.
    put(host / "proc/self/cgroup", "4:memory:/elsewhere\n0::/jobs/mine\n")
    groups = host / "sys/fs/cgroup"
    put_group(groups / "elsewhere", str(1 * MIB), 0)
    put_group(groups / "jobs/mine", "max", 7 * MIB)
    assert free_host_bytes(host) == 100 * MIB
    put_group(groups / "jobs", str(60 * MIB), 20 * MIB)
    assert free_host_bytes(host) == 40 * MIB
    put_group(groups / "jobs/mine", str(27 * MIB), 7 * MIB)
    assert free_host_bytes(host) == 20 * MIB


@pytest.mark.parametrize("file", ["proc/self/cgroup", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.stat"])
def test_what_cannot_be_read_is_passed_over(host: Path, file: str) -> None:
    put_group(host / "sys/fs/cgroup", "max", 0)
    put(host / file, "inactive_file\nunheard of\n")
    assert free_host_bytes(host) == 100 * MIB


def test_a_system_without_such_files_tells_what_nothing_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 3}.__getitem__)
    assert free_host_bytes(tmp_path) == 3 * 4096


def test_a_system_that_tells_nothing_has_nothing_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")
    assert free_host_bytes(tmp_path) == 0


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_this_host_has_some_memory_and_less_than_all() -> None:
    all_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_host_bytes() < all_bytes
