"""TARGET files for the command line's tests, and one thread for torch: the models are tiny."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TINY = ["--arg", "layers=3", "--arg", "width=16", "--arg", "heads=2", "--arg", "batch=4", "--arg", "length=16"]


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    """Run torch on one thread; a handful of numbers is slower, not faster, on several."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def target_file(tmp_path: Path) -> Callable[[str], str]:
    """Return what writes a Python file for a TARGET and returns its path."""

    def write(source: str, name: str = "train.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return str(path)

    return write
