"""The page of answers: each question has a page that exists, and commands that print what stands beside them."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.running import memfit
from tests.planning.model_families import gpt

from memfit.graph.model_profile import Link

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "answers.md").read_text(encoding="utf-8")
TRAIN, *ANSWERS = re.split(r"^## ", PAGE, flags=re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's train.py and with the profile of a step on a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (train,) = re.findall(r"```python\n(.*?)```", TRAIN, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(train, encoding="utf-8")
    importlib.invalidate_caches()
    replace(gpt(num_blocks=2), link=Link(50e9, 40e9, 1e-5, 64 * 2**30)).save(tmp_path / "gpu.json")
    yield tmp_path
    sys.modules.pop("train", None)


# The size that tunes best may be one whose plain step fits.
@pytest.mark.filterwarnings("ignore:the plan changes nothing")
def test_every_question_has_a_page_and_commands_that_print_what_is_shown(folder: Path) -> None:
    assert [answer.partition(".")[0] for answer in ANSWERS] == [str(number) for number in range(1, 16)]
    for answer in ANSWERS:
        assert re.search(r"\]\([\w-]+\.md", answer), answer
        blocks = re.findall(r"```(\w*)\n(.*?)```", answer, flags=re.DOTALL)
        assert blocks, answer
        for language, block in blocks:
            if language == "python":
                exec(compile(block, "docs/answers.md", "exec"), {})
                continue
            for line in block.splitlines():
                check_command(line)


def check_command(line: str) -> None:
    """Run a command, which prints what its comment says; scripts are run by the tests of the examples."""
    command, _, shown = line.partition("    # ")
    program, *arguments = shlex.split(command)
    if program != "memfit":
        assert (ROOT / arguments[-1]).is_file()
        return
    code, printed, errors = memfit(*arguments, columns=120)
    assert code == (2 if shown.startswith("error: ") else 0), (line, errors)
    assert " ".join(shown.split()) in " ".join(f"{printed} {errors}".split()), (line, printed, errors)
