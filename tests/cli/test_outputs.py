"""No command writes over one of its inputs, however the path is spelled; budgets and plots are checked first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.running import memfit
from tests.report.test_page import hostile_report

from memfit import Plan
from memfit.cli.output import check_outputs
from memfit.report.page import write_page


@pytest.fixture(scope="module")
def profile_text(profile_file: Path) -> str:
    return profile_file.read_text(encoding="utf-8")


def spelled(path: Path, spelling: str) -> str:
    """Return another path to the same file."""
    if spelling == "dots":
        return f"{path.parent}/../{path.parent.name}/{path.name}"
    other = path.with_name("link.json")
    if spelling == "symbolic link":
        other.symlink_to(path)
    elif spelling == "hard link":
        os.link(path, other)
    return str(path if spelling == "same" else other)


@pytest.mark.parametrize("spelling", ["same", "dots", "symbolic link", "hard link"])
@pytest.mark.parametrize(
    "arguments",
    [["plan", "--strategy", "full", "-o"], ["frontier", "--html"], ["frontier", "--plot"], ["report", "--html"]],
)
def test_an_output_that_is_the_input_is_refused(
    tmp_path: Path, profile_text: str, arguments: list[str], spelling: str
) -> None:
    file = tmp_path / "p.json"
    file.write_text(profile_text, encoding="utf-8")
    command, *options = arguments
    code, shown, errors = memfit(command, str(file), *options, spelled(file, spelling))
    assert (code, shown) == (2, "")
    assert "is an input of this command" in errors
    assert file.read_text(encoding="utf-8") == profile_text


@pytest.mark.parametrize(
    "options", [["profile", "-o"], ["fit", "--budget=1GiB", "-o"], ["fit", "--budget=1GiB", "--html"]]
)
@pytest.mark.parametrize("form", ["{}:build", "train:build"])
def test_the_source_of_the_target_is_never_written(
    target_file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, options: list[str], form: str
) -> None:
    path = Path(target_file("raise RuntimeError('it ran')"))
    source = path.read_text(encoding="utf-8")
    monkeypatch.chdir(path.parent)
    command, *rest = options
    code, _, errors = memfit(command, form.format(path), *rest, "train.py")
    assert code == 2
    assert "train.py is an input of this command" in errors
    assert path.read_text(encoding="utf-8") == source


@pytest.mark.parametrize(
    "content", ["import torch\n", '{"format": "memfit-layers", "version": 1, "layers": []}', "notes"]
)
@pytest.mark.parametrize(
    "arguments", [["plan", "--strategy", "full", "-o"], ["frontier", "--html"], ["report", "--html"]]
)
def test_a_file_that_memfit_did_not_write_is_kept(
    tmp_path: Path, profile_file: Path, arguments: list[str], content: str
) -> None:
    other = tmp_path / "model.py"
    other.write_text(content, encoding="utf-8")
    command, *options = arguments
    code, shown, errors = memfit(command, str(profile_file), *options, str(other))
    assert (code, shown) == (2, "")
    assert "is there already, and memfit did not write it" in errors
    assert other.read_text(encoding="utf-8") == content


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_what_memfit_wrote_is_written_over(tmp_path: Path, plan_file: Path, name: str) -> None:
    file = tmp_path / name
    Plan.load(plan_file).save(file)
    check_outputs(file)


def test_an_empty_file_and_a_page_of_memfit_are_written_over(tmp_path: Path) -> None:
    page, empty = tmp_path / "page.html", tmp_path / "empty.json"
    write_page(page, hostile_report())
    empty.touch()
    check_outputs(page, empty)


def test_the_demo_keeps_a_users_files_of_the_same_names(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("mine", encoding="utf-8")
    code, shown, errors = memfit("demo", "--out", str(tmp_path))
    assert (code, shown) == (2, "")
    assert "plan.json is there already, and memfit did not write it" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_two_outputs_in_one_file_are_refused(tmp_path: Path, profile_text: str) -> None:
    file, page = tmp_path / "p.json", str(tmp_path / "page.svg")
    file.write_text(profile_text, encoding="utf-8")
    code, _, errors = memfit("frontier", str(file), "--html", page, "--plot", page)
    assert (code, "is given for two outputs" in errors) == (2, True)
    assert not Path(page).exists()


def test_a_plot_of_another_format_is_refused_before_planning(tmp_path: Path, profile_text: str) -> None:
    file, page = tmp_path / "p.json", tmp_path / "page.html"
    file.write_text(profile_text, encoding="utf-8")
    code, _, errors = memfit("frontier", str(file), "--html", str(page), "--plot", str(tmp_path / "x.bmp"))
    assert (code, "a plot is written as .png, .svg, .pdf" in errors) == (2, True)
    assert not page.exists()


@pytest.mark.parametrize("budget", ["6G", "6Gi", "1.5GiB", "90%"])
def test_a_budget_that_fits_the_plain_step_says_so(tmp_path: Path, profile_text: str, budget: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(profile_text, encoding="utf-8")
    code, shown, errors = memfit("plan", str(file), "--budget", budget)
    assert (code, errors) == (0, "")
    assert "The plain step fits: the plan saves every value and changes nothing." in shown
