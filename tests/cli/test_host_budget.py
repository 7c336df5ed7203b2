"""``--host-budget``: plans that offload, on the command line. The profile is of a GPU that need not be here."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import TINY
from tests.cli.running import memfit
from tests.planning.model_families import gpt

from memfit import ModelProfile, Plan
from memfit.cli.options import parse_host_budget
from memfit.graph.model_profile import Link

GIB = 2**30
BUDGET = "9GiB"


@pytest.fixture(scope="module")
def gpu_profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a profile whose device has a link to a host with 64 GiB free."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    measured = gpt(1)
    link = Link(50e9, 45e9, 1e-5, host_free_bytes=64 * GIB)
    replace(measured, device="cuda:0", peak_bytes=12 * GIB, link=link).save(path)
    return str(path)


@pytest.fixture(scope="module")
def smallest(gpu_profile: str) -> str:
    """A budget that recomputing alone can meet, but not for free."""
    points = json.loads(memfit("frontier", gpu_profile, "--json")[1])["points"]
    return f"{(points[0]['peak_bytes'] + 3 * points[-1]['peak_bytes']) // 4}B"


@pytest.fixture(scope="module")
def offloading(gpu_profile: str, smallest: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What ``memfit plan`` prints of a plan that may offload, and the file of the plan."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    options = ["--budget", smallest, "--host-budget", "auto", "-o", str(path)]
    code, shown, errors = memfit("plan", gpu_profile, *options, columns=140)
    assert (code, errors) == (0, "")
    return shown, path


def test_a_plan_offloads_where_it_may_and_says_how_much(offloading: tuple[str, Path]) -> None:
    shown, path = offloading
    plan = Plan.load(path)
    num_of = Counter(str(decision) for decision in plan.decisions.values())
    assert num_of["offload"] > 0
    assert 0 < plan.host_bytes <= 32 * GIB
    assert "auto on the host" in shown
    assert f"{num_of['recompute']} recomputed, {num_of['offload']} offloaded" in shown
    assert "of pinned memory" in shown
    assert "values offloaded" in shown


def test_without_the_option_nothing_is_offloaded(gpu_profile: str, smallest: str, offloading: tuple[str, Path]) -> None:
    code, shown, _ = memfit("plan", gpu_profile, "--budget", smallest, "--host-budget", "0", "--json")
    without = json.loads(shown)
    assert (code, "host_bytes" in without) == (0, False)
    assert Plan.load(offloading[1]).predicted_overhead < without["predicted_overhead"]


def test_bytes_texts_and_auto_are_read() -> None:
    assert [parse_host_budget(text) for text in ("32GiB", "auto", "4096", None)] == ["32GiB", "auto", 4096, 0]


def test_the_frontier_tells_what_each_plan_takes_of_the_host(gpu_profile: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ["--points", "4", "--host-budget", "1GiB", "--html", str(page)]
    code, shown, _ = memfit("frontier", gpu_profile, *options)
    assert (code, "on the host" in shown) == (0, True)
    text = page.read_text(encoding="utf-8")
    assert "Link to the host" in text
    document = json.loads(text.partition('id="report-data">')[2].partition("</script>")[0])
    assert 0 < max(point["host_bytes"] for point in document["points"]) <= GIB


def test_a_report_has_the_plan_among_others_that_may_offload_as_much(
    gpu_profile: str, offloading: tuple[str, Path], tmp_path: Path
) -> None:
    plan_file, page = offloading[1], tmp_path / "page.html"
    assert memfit("report", gpu_profile, str(plan_file), "--html", str(page))[0] == 0
    text = page.read_text(encoding="utf-8")
    document = json.loads(text.partition('id="report-data">')[2].partition("</script>")[0])
    entries = document["points"]
    assert entries[document["selected"]]["host_bytes"] == Plan.load(plan_file).host_bytes
    # The plan is on the line: nothing smaller is as fast, nothing faster is as small.
    overheads = [entry["overhead"] for entry in entries]
    assert overheads == sorted(overheads, reverse=True)


def test_a_plan_that_offloads_can_be_shown_beside_a_profile_without_a_link(
    gpu_profile: str, offloading: tuple[str, Path], tmp_path: Path
) -> None:
    old = tmp_path / "old.json"
    replace(ModelProfile.load(gpu_profile), link=None).save(old)
    assert memfit("report", str(old), str(offloading[1]), "--html", str(tmp_path / "page.html"))[0] == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--budget", BUDGET, "--host-budget", "lots"], "'lots' is not a size"),
        (["--budget", BUDGET, "--host-budget", "0.5"], "'0.5' is not a size; write a number and a unit"),
        (["--strategy", "full", "--host-budget", "auto"], "--host-budget needs --budget; --strategy full"),
    ],
)
def test_a_wrong_host_budget_is_one_line(profile_file: Path, options: list[str], told: str) -> None:
    code, shown, errors = memfit("plan", str(profile_file), *options)
    assert (code, shown, errors.count("\n")) == (2, "", 1)
    assert told in errors


def test_layers_have_nothing_to_offload() -> None:
    layers = str(Path(__file__).parents[2] / "examples" / "layers.json")
    code, _, errors = memfit("plan", layers, "--budget", "1GiB", "--host-budget", "1GiB")
    assert (code, "--host-budget offloads values" in errors) == (2, True)


def test_on_a_cpu_fit_says_that_there_is_nowhere_to_offload_to() -> None:
    options = ["--budget", "1GiB", "--host-budget", "64GiB"]
    code, shown, errors = memfit("fit", "memfit.models:gpt", *TINY, *options)
    assert (code, shown) == (2, "")
    assert "host_budget='64GiB' needs the speed of the link from 'cpu' to the host" in errors
    assert "nowhere to offload to; leave host_budget out" in errors
