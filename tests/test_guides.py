"""The guides' code is run as it stands, each guide from top to bottom in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import memfit

DOCS = Path(__file__).parent.parent / "docs"


# The size that tunes best may be one whose plain step fits.
@pytest.mark.filterwarnings("ignore:the plan changes nothing")
@pytest.mark.parametrize(
    "guide",
    [
        "fine-tuning",
        "pretraining",
        "vision",
        "offloading",
        "chunked-loss",
        "compiled",
        "start",
        "lora",
        "api",
        "your-own-step",
        "lengths",
        "tune",
    ],
)
def test_the_guides_code_runs(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{guide}.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    names: dict[str, object] = {"__name__": guide}
    for block in blocks:
        exec(compile(block, f"docs/{guide}.md", "exec"), names)


def test_linked_files_of_the_documentation_exist() -> None:
    for page in DOCS.glob("*.md"):
        links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        assert [link for link in links if not (page.parent / link).exists()] == [], page.name


def test_every_public_name_is_in_the_reference_and_in_an_example() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^::: memfit\.(\w+)$", page, flags=re.MULTILINE))
    assert documented == set(memfit.__all__) - {"__version__"}
    examples = "\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
    assert [name for name in memfit.__all__ if not re.search(rf"\b{name}\b", examples)] == []
