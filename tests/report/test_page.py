"""The file itself: whole, alone, and safe from the names inside it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.planning.model_families import gpt
from tests.planning.step_builder import StepBuilder
from tests.report.planned_steps import point_recomputing

from memfit.environment import environment_facts
from memfit.errors import PlanFileError
from memfit.report.page import page_text, write_page
from memfit.report.page_data import Mark, ReportData
from memfit.report.page_document import page_document

HOSTILE = "</script><img src=x onerror=alert(1)>&amp;@@data@@\u2028\ud800'\""


def hostile_report() -> ReportData:
    b = StepBuilder()
    path = b.block(HOSTILE)
    (y,) = b.op(f"{path}.act", "tanh", [b.batch(8)], 30, saves_outputs=[0])
    b.op(None, "sum", [y], 4)
    profile = b.finish(HOSTILE)
    marks = [Mark(HOSTILE, 10, 0.5, note=HOSTILE)]
    point = point_recomputing(profile, set())
    return ReportData(profile, [point], marks=marks, title=HOSTILE, facts={HOSTILE: HOSTILE})


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(name for name, _ in attrs)


def embedded(text: str) -> Any:
    return json.loads(re.findall(r'id="report-data">(.*?)</script>', text)[0])


def as_json(document: dict[str, Any]) -> Any:
    """The document with JSON's types alone."""
    return json.loads(json.dumps(document))


def test_the_data_in_the_file_is_the_document() -> None:
    profile = gpt(num_blocks=2)
    data = ReportData(profile, [point_recomputing(profile, set())], facts=environment_facts())
    assert embedded(page_text(data)) == as_json(page_document(data))


def test_names_never_become_markup() -> None:
    text = page_text(hostile_report())
    tags = _Tags()
    tags.feed(text)
    assert "img" not in tags.tags
    assert tags.tags.count("script") == 2
    assert not any(name.startswith("on") for name in tags.attributes)
    assert embedded(text) == as_json(page_document(hostile_report()))


def test_the_file_refers_to_nothing_outside_itself() -> None:
    profile = gpt(num_blocks=2)
    text = page_text(ReportData(profile, [point_recomputing(profile, set())]))
    assert set(re.findall(r"[a-z]+://[^\"'\s)]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|src=", text)


def test_scripts_put_no_markup_together() -> None:
    text = page_text(hostile_report())
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_write_page_says_why_a_path_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="No such file or directory"):
        write_page(tmp_path / "missing" / "page.html", hostile_report())
    write_page(tmp_path / "page.html", hostile_report())
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_environment_names_the_machine_and_the_versions() -> None:
    facts = environment_facts()
    assert list(facts) == ["Processor", "System", "memfit", "Python", "torch", "numpy", "scipy"]
    assert all(facts.values())
