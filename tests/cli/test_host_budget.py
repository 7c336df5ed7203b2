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
from memfit.graph.model_profile import Link

GIB = 2**30
BUDGET = "9GiB"


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the file of a profile whose device has a link to a host with 64 GiB free."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    measured = gpt(4)
    link = Link(50e9, 45e9, 1e-5, host_free_bytes=64 * GIB)
    replace(measured, device="cuda:0", peak_bytes=12 * GIB, link=link).save(path)
    return str(path)


def test_a_plan_offloads_where_it_may_and_says_how_much(profile_file: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, shown, errors = memfit(
        "plan", profile_file, "--budget", BUDGET, "--host-budget", "auto", "-o", str(path), columns=140
    )
    plan = Plan.load(path)
    num_of = Counter(str(decision) for decision in plan.decisions.values())
    assert (code, errors) == (0, "")
    assert num_of["offload"] > 0
    assert 0 < plan.host_bytes <= 32 * GIB
    assert "profile.json: budget 9GiB, auto on the host" in shown
    assert f"{num_of['recompute']} of {len(plan.decisions)} recomputed, {num_of['offload']} offloaded" in shown
    assert "of pinned memory" in shown
    assert "values offloaded" in shown


def test_without_the_option_nothing_is_offloaded(profile_file: str) -> None:
    code, shown, _ = memfit("plan", profile_file, "--budget", BUDGET, "--json")
    without = json.loads(shown)
    assert (code, "host_bytes" in without) == (0, False)
    assert memfit("plan", profile_file, "--budget", BUDGET, "--host-budget", "0", "--json") == (0, shown, "")
    code, shown, _ = memfit("plan", profile_file, "--budget", BUDGET, "--host-budget", "32GiB", "--json")
    assert json.loads(shown)["predicted_overhead"] < without["predicted_overhead"]


def test_bytes_texts_and_auto_are_the_same_budget(profile_file: str) -> None:
    asked = [("plan", profile_file, "--budget", BUDGET, "--json", "--host-budget", text) for text in ("32GiB", "auto")]
    asked.append((*asked[0][:-1], str(32 * GIB)))
    found = {memfit(*arguments) for arguments in asked}
    assert len(found) == 1
    ((code, shown, _),) = found
    assert code == 0
    assert json.loads(shown)["host_bytes"] > 0


def test_the_frontier_tells_what_each_plan_takes_of_the_host(profile_file: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ["--points", "4", "--host-budget", "1GiB"]
    code, shown, _ = memfit("frontier", profile_file, *options, "--html", str(page), "--json")
    host_bytes = [point["host_bytes"] for point in json.loads(shown)["points"]]
    assert code == 0
    assert host_bytes[0] == 0 < max(host_bytes) <= GIB
    assert "Link to the host" in page.read_text(encoding="utf-8")
    code, shown, _ = memfit("frontier", profile_file, *options)
    assert (code, "on the host" in shown) == (0, True)
    code, shown, _ = memfit("frontier", profile_file, "--points", "4")
    assert (code, "on the host" in shown) == (0, False)


def test_a_report_has_the_plan_among_others_that_may_offload_as_much(profile_file: str, tmp_path: Path) -> None:
    plan_file, page = str(tmp_path / "plan.json"), tmp_path / "page.html"
    assert memfit("plan", profile_file, "--budget", BUDGET, "--host-budget", "auto", "-o", plan_file)[0] == 0
    assert memfit("report", profile_file, plan_file, "--html", str(page))[0] == 0
    text = page.read_text(encoding="utf-8")
    document = json.loads(text.partition('id="report-data">')[2].partition("</script>")[0])
    entries = document["points"]
    assert entries[document["selected"]]["host_bytes"] == Plan.load(plan_file).host_bytes
    assert len([entry for entry in entries if entry["host_bytes"]]) > 1
    # The plan is on the line: nothing smaller is as fast, nothing faster is as small.
    overheads = [entry["overhead"] for entry in entries]
    assert overheads == sorted(overheads, reverse=True)


def test_a_plan_that_offloads_can_be_shown_beside_a_profile_without_a_link(profile_file: str, tmp_path: Path) -> None:
    plan_file, old = str(tmp_path / "plan.json"), tmp_path / "old.json"
    assert memfit("plan", profile_file, "--budget", BUDGET, "--host-budget", "auto", "-o", plan_file)[0] == 0
    replace(ModelProfile.load(profile_file), link=None).save(old)
    assert memfit("report", str(old), plan_file, "--html", str(tmp_path / "page.html"))[0] == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--budget", BUDGET, "--host-budget", "lots"], "'lots' is not a size"),
        (["--budget", BUDGET, "--host-budget", "0.5"], "'0.5' is not a size; write a number and a unit"),
        (["--strategy", "full", "--host-budget", "auto"], "--host-budget goes with --budget; --strategy full"),
    ],
)
def test_a_wrong_host_budget_is_one_line(profile_file: str, options: list[str], told: str) -> None:
    code, shown, errors = memfit("plan", profile_file, *options)
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
    assert "host_budget='64GiB' needs to know the way from 'cpu' to the host's memory" in errors
    assert "nowhere to offload to; leave host_budget out" in errors
