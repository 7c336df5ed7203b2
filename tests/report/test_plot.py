"""The trade-off as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.planning.model_families import gpt

from memfit.errors import InvalidParameterError, MemfitError, PlanFileError
from memfit.planning.planner import frontier
from memfit.report.page_data import Mark, ReportData
from memfit.report.plot import write_plot
from memfit.report.strategy_marks import strategy_marks


@pytest.fixture(scope="module")
def report() -> ReportData:
    profile = gpt(num_blocks=2)
    marks = (*strategy_marks(profile), Mark("measured $here", 2**30, 0.02, is_measured=True))
    return ReportData(profile, frontier(profile), marks=marks, title="a $title", budget_bytes=2**32)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_suffix_says_the_format(report: ReportData, tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"frontier{suffix}"
    write_plot(path, report)
    assert path.read_bytes().startswith(magic)


def test_a_picture_holds_every_mark_and_names_its_units(report: ReportData, tmp_path: Path) -> None:
    path = tmp_path / "frontier.svg"
    write_plot(path, report)
    # Matplotlib draws text as glyphs and puts the text itself into a comment.
    text = path.read_text()
    for words in (*(mark.label for mark in report.marks), "peak memory of the step (GiB)", "a $title", "budget"):
        assert f"<!-- {words} -->" in text


def test_other_formats_no_plans_and_unwritable_paths_are_refused(report: ReportData, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=r"\.png, \.svg, \.pdf; got 'frontier\.gif'"):
        write_plot("frontier.gif", report)
    with pytest.raises(InvalidParameterError, match="at least one plan"):
        write_plot(tmp_path / "frontier.png", ReportData(report.profile, []))
    with pytest.raises(PlanFileError, match="No such file or directory"):
        write_plot(tmp_path / "missing" / "frontier.png", report)


def test_without_matplotlib_the_error_says_what_to_install(
    report: ReportData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MemfitError, match=r"pip install 'memfit\[plot\]'"):
        write_plot(tmp_path / "frontier.png", report)
