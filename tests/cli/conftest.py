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


@pytest.fixture(scope="session")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of a tiny GPT, for tests that only read it."""
    from memfit import models, profile

    model, batch = models.gpt(layers=3, width=16, heads=2, batch=4, length=16)
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profile(model, batch).save(path)
    return path


@pytest.fixture(scope="session")
def plan_file(profile_file: Path) -> Path:
    """A plan of that profile which recomputes every block, for tests that only read it."""
    from memfit import Full, ModelProfile, plan

    path = profile_file.with_name("plan.json")
    plan(ModelProfile.load(profile_file), strategy=Full()).save(path)
    return path


@pytest.fixture
def target_file(tmp_path: Path) -> Callable[[str], str]:
    """Return what writes a Python file for a TARGET and returns its path."""

    def write(source: str, name: str = "train.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return str(path)

    return write
